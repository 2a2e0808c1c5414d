{{/* Names, labels and images. */}}

{{- define "duplane.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "duplane.certificateName" -}}
{{- .Values.fabric.name | default (include "duplane.fullname" .) -}}
{{- end -}}

{{/* Labels that selectors use, so they must never change. Arguments: root, role, instance (of this role). */}}
{{- define "duplane.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .instance }}
duplane.internal/name: {{ . }}
{{- end }}
{{- end -}}

{{- define "duplane.labels" -}}
{{ include "duplane.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Arguments: root, repository. */}}
{{- define "duplane.image" -}}
{{- with .root.Values.images -}}
{{- printf "%s%s:%s" .prefix $.repository (.tag | default $.root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Gives each item the fields of the defaults that it does not set. Arguments: defaults, items. Returns {items: [...]}. */}}
{{- define "duplane.withDefaults" -}}
{{- $found := list -}}
{{- range $item := .items -}}
{{- $merged := mergeOverwrite (deepCopy $.defaults) (deepCopy $item) -}}
{{- /* Of these only one whole makes sense: two sources of one volume, for example, are none. */ -}}
{{- range list "modelVolume" "labels" "nodeSelector" "affinity" "podAnnotations" "jwt" -}}
{{- if hasKey $item . -}}
{{- $_ := set $merged . (get $item .) -}}
{{- end -}}
{{- end -}}
{{- $found = append $found $merged -}}
{{- end -}}
{{- dict "items" $found | toYaml -}}
{{- end -}}

{{/* The secret with the certificate of a role. Arguments: root, role. */}}
{{- define "duplane.certificateSecret" -}}
{{- with .root.Values.fabric.certificates -}}
{{- if eq .source "secrets" -}}
{{- get .secrets $.role -}}
{{- else -}}
{{- printf "%s-%s-certificate" (include "duplane.fullname" $.root) $.role -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "duplane.schedulers" -}}
{{- printf "%s-scheduler.%s.svc.%s:8010" (include "duplane.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{- end -}}

{{/* The port of an address HOST:PORT. */}}
{{- define "duplane.port" -}}
{{- regexFind "[0-9]+$" . -}}
{{- end -}}

{{/* The port of a URL. */}}
{{- define "duplane.urlPort" -}}
{{- $url := urlParse . -}}
{{- regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end -}}
