{{/* Contradictions that the schema cannot express. Each message begins with the name of the value. Arguments: root, pools, edges. */}}
{{- define "duplane.checks" -}}
{{- $values := .root.Values -}}
{{- with $values.fabric.certificates -}}
{{- if eq .source "secrets" -}}
{{- range $role, $secret := .secrets -}}
{{- if not $secret -}}
{{- fail (printf "fabric.certificates.secrets.%s is empty: fabric.certificates.source is `secrets`, so name the secret" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $values.scheduler -}}
{{- if eq .store "memory" -}}
{{- if gt (int .replicas) 1 -}}
{{- fail (printf "scheduler.replicas is %d: with scheduler.store `memory` there can be only one scheduler" (int .replicas)) -}}
{{- end -}}
{{- else -}}
{{- if not .etcd.endpoints -}}
{{- fail "scheduler.etcd.endpoints is empty: scheduler.store is `etcd`, so name its members as HOST:PORT" -}}
{{- end -}}
{{- if and (not .etcd.tlsSecret) (not .etcd.plaintext) -}}
{{- fail "scheduler.etcd.tlsSecret is empty: name the secret with ca.crt, or allow a connection without TLS with scheduler.etcd.plaintext" -}}
{{- end -}}
{{- if and .etcd.tlsSecret .etcd.plaintext -}}
{{- fail "scheduler.etcd.plaintext is true, but scheduler.etcd.tlsSecret is set: remove one of them" -}}
{{- end -}}
{{- if ne (empty .etcd.user) (empty .etcd.passwordSecret) -}}
{{- fail "scheduler.etcd.user and scheduler.etcd.passwordSecret must be set together" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $pools := list -}}
{{- range $i, $pool := .pools -}}
{{- if has .name $pools -}}
{{- fail (printf "pools[%d].name: there are two pools with the name %s" $i .name) -}}
{{- end -}}
{{- $pools = append $pools .name -}}
{{- if and (not (has .checkpoint (list "scripted" "/models/default"))) (not .modelVolume) -}}
{{- fail (printf "pools[%d].modelVolume is empty: name the volume that has %s" $i .checkpoint) -}}
{{- end -}}
{{- with .autoscaling -}}
{{- if and .enabled (not $values.keda.prometheusUrl) -}}
{{- fail (printf "keda.prometheusUrl is empty: pools[%d].autoscaling.enabled is true" $i) -}}
{{- end -}}
{{- if gt (int .min) (int .max) -}}
{{- fail (printf "pools[%d].autoscaling.min is %d, above pools[%d].autoscaling.max" $i (int .min) $i) -}}
{{- end -}}
{{- end -}}
{{- if and (eq (int .update.maxSurge) 0) (eq (int .update.maxUnavailable) 0) -}}
{{- fail (printf "pools[%d].update: maxSurge and maxUnavailable must not both be 0" $i) -}}
{{- end -}}
{{- end -}}
{{- $edges := list -}}
{{- range $i, $edge := .edges -}}
{{- if has .name $edges -}}
{{- fail (printf "edges[%d].name: there are two edges with the name %s" $i .name) -}}
{{- end -}}
{{- $edges = append $edges .name -}}
{{- if not (has .pool $pools) -}}
{{- fail (printf "edges[%d].pool is %s, must be the name of a pool: %s" $i .pool (join ", " $pools)) -}}
{{- end -}}
{{- if eq .auth "keys" -}}
{{- if and (not .apiKeysSecret) (not .jwt) -}}
{{- fail (printf "edges[%d].apiKeysSecret is empty: name the secret with keys.toml, or set edges[%d].jwt, or let everybody in with edges[%d].auth: none" $i $i $i) -}}
{{- end -}}
{{- else if or .apiKeysSecret .jwt -}}
{{- fail (printf "edges[%d].auth is none, so neither apiKeysSecret nor jwt can be set" $i) -}}
{{- end -}}
{{- if and (gt (int .replicas) 1) (eq .auth "keys") (not .tokenKeySecret) -}}
{{- fail (printf "edges[%d].tokenKeySecret is empty: %d replicas need the same key, so that each accepts the ephemeral tokens of the others" $i (int .replicas)) -}}
{{- end -}}
{{- if and .ingress.enabled (not .hosts) -}}
{{- fail (printf "edges[%d].hosts is empty: edges[%d].ingress.enabled is true" $i $i) -}}
{{- end -}}
{{- if and .ingress.enabled .tlsSecret -}}
{{- fail (printf "edges[%d].tlsSecret is set, but edges[%d].ingress.enabled is true: the ingress ends TLS, so name its certificate in edges[%d].ingress.tlsSecret" $i $i $i) -}}
{{- end -}}
{{- end -}}
{{- end -}}
