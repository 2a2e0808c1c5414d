{{/* Flags of each role, as a YAML list. */}}

{{- define "duplane.schedulerArgs" -}}
- --listen=0.0.0.0:8010
{{- with .root.Values.scheduler }}
{{- if eq .store "etcd" }}
- --store=etcd://{{ join "," .etcd.endpoints }}?prefix={{ .etcd.prefix }}
{{- if .etcd.tlsSecret }}
- --store-ca=/etc/duplane/etcd/ca.crt
{{- if .etcd.clientCertificate }}
- --store-cert=/etc/duplane/etcd/tls.crt
- --store-key=/etc/duplane/etcd/tls.key
{{- end }}
{{- end }}
{{- if .etcd.user }}
- --store-user={{ .etcd.user }}
- --store-password=/etc/duplane/etcd-password/password
{{- end }}
{{- else }}
- "--store=memory:"
{{- end }}
{{- end }}
{{- $pools := list }}
{{- range .root.Values.pools }}
{{- $pools = append $pools .name }}
{{- end }}
- --pools={{ join "," $pools }}
{{ include "duplane.commonArgs" . }}
{{- end -}}

{{/* Arguments: root, pool. */}}
{{- define "duplane.workerArgs" -}}
- --scheduler={{ include "duplane.schedulers" .root }}
- --listen=0.0.0.0:8020
- --advertise=$(POD_IP):8020
- --worker-id={{ include "duplane.certificateName" .root }}-$(POD_NAME)
{{- with .pool }}
- --pool={{ .name }}
- --checkpoint={{ .checkpoint }}
- --slots={{ .slots }}
- --device={{ ternary "cuda:0" "cpu" (gt (int .gpus) 0) }}
{{- if .labels }}
{{- $labels := list }}
{{- range $key, $value := .labels }}
{{- $labels = append $labels (printf "%s=%s" $key $value) }}
{{- end }}
- --label={{ join "," $labels }}
{{- end }}
- --drain-timeout-s={{ .drainSeconds }}
{{- end }}
{{ include "duplane.commonArgs" . }}
{{- end -}}

{{/* Arguments: root, edge. */}}
{{- define "duplane.edgeArgs" -}}
- --scheduler={{ include "duplane.schedulers" .root }}
- --listen=0.0.0.0:8006
- --operator-listen=127.0.0.1:8007
{{- with .edge }}
- --pool={{ .pool }}
- --auth={{ .auth }}
{{- if .tlsSecret }}
- --tls-cert=/etc/duplane/tls/tls.crt
- --tls-key=/etc/duplane/tls/tls.key
{{- else }}
- --behind-tls-proxy
{{- end }}
{{- $service := printf "%s-edge-%s" (include "duplane.fullname" $.root) .name }}
{{- $namespace := $.root.Release.Namespace }}
{{- $own := list $service (printf "%s.%s" $service $namespace) (printf "%s.%s.svc" $service $namespace) }}
{{- $own = append $own (printf "%s.%s.svc.%s" $service $namespace $.root.Values.clusterDomain) }}
- --allowed-hosts={{ join "," (concat .hosts $own) }}
{{- with .trustedProxies }}
- --trusted-proxies={{ join "," . }}
{{- end }}
{{- with .allowedOrigins }}
- --allowed-origins={{ join "," . }}
{{- end }}
{{- if .apiKeysSecret }}
- --api-keys=/etc/duplane/api-keys/keys.toml
{{- end }}
{{- if .operatorKeysSecret }}
- --operator-keys=/etc/duplane/operator-keys/operators.toml
{{- end }}
{{- if .tokenKeySecret }}
- --token-key-file=/etc/duplane/token-key/token.key
{{- end }}
{{- with .jwt }}
- --jwks={{ .jwks }}
- --jwt-issuer={{ .issuer }}
- --jwt-audience={{ .audience }}
{{- if .operators }}
- --jwt-operators
{{- end }}
{{- end }}
{{- if .recordings.claim }}
- --record=/var/lib/duplane/recordings
- --record-days={{ .recordings.days }}
{{- end }}
{{- if .voices.claim }}
- --ref-audio=/var/lib/duplane/voices
{{- end }}
- --drain-s={{ .drainSeconds }}
{{- end }}
{{ include "duplane.commonArgs" . }}
{{- end -}}
