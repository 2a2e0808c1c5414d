{{/* Parts of the pods of all roles. */}}

{{/* Flags of all roles. Arguments: root. */}}
{{- define "duplane.commonArgs" -}}
- --fabric-tls=/etc/duplane/certificate
- --fabric-trust-domain={{ .root.Values.fabric.trustDomain }}
- --fabric-deny=/etc/duplane/deny/list
- --health-listen=0.0.0.0:8080
- --metrics-listen=0.0.0.0:9100
- --metrics-public
- --log-level={{ .root.Values.logging.level }}
- --log-format={{ .root.Values.logging.format }}
{{- end -}}

{{/* Fails if a further flag is set by the chart, too. Arguments: args (YAML), extraArgs, value. */}}
{{- define "duplane.args" -}}
{{- $args := .args | fromYamlArray -}}
{{- $names := list "--admin-token" "--config" -}}
{{- range $args -}}
{{- $names = append $names (index (splitList "=" .) 0) -}}
{{- end -}}
{{- range .extraArgs -}}
{{- $name := index (splitList "=" .) 0 -}}
{{- if eq $name "--admin-token" "--config" -}}
{{- fail (printf "%s: %s is refused: an argument or a file of the image must have no secret" $.value $name) -}}
{{- end -}}
{{- if has $name $names -}}
{{- fail (printf "%s: the chart sets %s from another value" $.value $name) -}}
{{- end -}}
{{- end -}}
{{- concat $args .extraArgs | toYaml -}}
{{- end -}}

{{/* Fields of a pod that are the same for all roles. Arguments: root, settings (of the role), grace. */}}
{{- define "duplane.pod" -}}
serviceAccountName: {{ include "duplane.fullname" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .settings.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .settings.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Spreads the pods of a role over nodes. Arguments: as for duplane.selector. */}}
{{- define "duplane.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "duplane.selector" . | nindent 8 }}
{{- end -}}

{{/* Fields of a container that are the same for all roles. Arguments: root. */}}
{{- define "duplane.container" -}}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Environment of all roles: no secret is ever here. Arguments: root. */}}
{{- define "duplane.environment" -}}
- {name: HOME, value: /tmp}
{{- with .root.Values.tracing.endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- end -}}

{{/* Probes of the plaintext listener for health. Arguments: startupSeconds, failuresToRestart. */}}
{{- define "duplane.probes" -}}
startupProbe:
  httpGet: {path: /startupz, port: health}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .startupSeconds 4) 5 }}
livenessProbe:
  httpGet: {path: /livez, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ .failuresToRestart | default 6 }}
  # A process that is not live cannot drain.
  terminationGracePeriodSeconds: 30
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{- define "duplane.commonMounts" -}}
- {name: certificate, mountPath: /etc/duplane/certificate, readOnly: true}
- {name: deny, mountPath: /etc/duplane/deny, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{/* Arguments: root, role, temporarySize. */}}
{{- define "duplane.commonVolumes" -}}
- name: certificate
  secret:
    secretName: {{ include "duplane.certificateSecret" . }}
    defaultMode: 288 # 0440: the processes refuse keys that others can read
- name: deny
  configMap:
    name: {{ include "duplane.fullname" .root }}-deny
- name: tmp
  emptyDir: {sizeLimit: {{ .temporarySize }}}
{{- end -}}

{{/* A volume and its mount, for a secret that is a file. Arguments: name, secret. */}}
{{- define "duplane.secretVolume" -}}
- name: {{ .name }}
  secret: {secretName: {{ .secret }}, defaultMode: 288}
{{- end -}}
{{- define "duplane.secretMount" -}}
- {name: {{ .name }}, mountPath: /etc/duplane/{{ .name }}, readOnly: true}
{{- end -}}
