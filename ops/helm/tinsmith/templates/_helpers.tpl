{{/* The labels of an object. Give the root and the component. */}}
{{- define "tinsmith.labels" -}}
{{ include "tinsmith.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* The labels that select a component's pods. */}}
{{- define "tinsmith.selector" -}}
{{ include "tinsmith.ours" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The labels of all our pods. */}}
{{- define "tinsmith.ours" -}}
app.kubernetes.io/name: tinsmith
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The name of a component's objects. */}}
{{- define "tinsmith.name" -}}
{{- $name := printf "%s-%s" .root.Release.Name .component -}}
{{- if gt (len $name) 52 }}{{ fail (printf "%s is longer than 52 letters: choose a shorter name for the release or a shorter id" $name) }}{{ end -}}
{{- $name -}}
{{- end }}

{{/* A value as TOML. JSON's scalars are TOML as well, but null: a key without a value is left out. */}}
{{- define "tinsmith.toml" -}}
{{- if kindIs "map" . -}}
{ {{- include "tinsmith.pairs" . | fromJsonArray | join ", " -}} }
{{- else if kindIs "slice" . -}}
[ {{- range $i, $one := . }}{{ if $i }}, {{ end }}{{ include "tinsmith.toml" $one }}{{ end -}} ]
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end }}

{{/* The texts `key = value` of a table, as a JSON list. */}}
{{- define "tinsmith.pairs" -}}
{{- $pairs := list }}
{{- range $key := keys . | sortAlpha }}
{{- $value := get $ $key }}
{{- if not (kindIs "invalid" $value) }}
{{- $name := ternary $key (toJson $key) (regexMatch "^[A-Za-z0-9_-]+$" $key) }}
{{- $pairs = append $pairs (printf "%s = %s" $name (include "tinsmith.toml" $value)) }}
{{- end }}
{{- end }}
{{- toJson $pairs }}
{{- end }}

{{/* The lines of a section. */}}
{{- define "tinsmith.section" -}}
{{- range $pair := include "tinsmith.pairs" . | fromJsonArray }}
{{ $pair }}
{{- end }}
{{- end }}

{{/* The workers of all base models as a JSON list: the base model, the section, the role as in the metrics, the name
and port of each, and the seconds that it may take to start. */}}
{{- define "tinsmith.workers" -}}
{{- $ports := dict "trainer" 9101 "sampler" 9102 "full" 9103 "full_sampler" 9104 }}
{{- $roles := dict "trainer" "trainer" "sampler" "sampler" "full" "full_trainer" "full_sampler" "full_sampler" }}
{{- $found := list }}
{{- range $base := .Values.baseModels }}
{{- range $section := list "trainer" "sampler" "full" "full_sampler" }}
{{- with get $base $section }}
{{- $component := printf "%s-%s" (replace "_" "-" $section) $base.id }}
{{- $found = append $found (dict "base" $base.name "section" $section "role" (get $roles $section) "component" $component "port" (get $ports $section) "trains" (has $section (list "trainer" "full")) "partner" (printf "%s-%s" (ternary "full" "trainer" (hasPrefix "full" $section)) $base.id) "startup" (default 1800 .startupSeconds) "nodes" (default 1 .nodes) "gpus" (default 0 .gpus) "values" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{- define "tinsmith.image" -}}
{{- $image := .root.Values.image -}}
{{ if $image.registry }}{{ $image.registry }}/{{ end }}{{ get $image .name }}:{{ $image.tag }}
{{- end }}

{{/* The security of a pod and of its containers. Give the user's number. */}}
{{- define "tinsmith.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tinsmith.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* The servers' addresses and the secrets, each from the Secret. */}}
{{- define "tinsmith.env" -}}
- {name: TINSMITH_SETTINGS, value: /etc/tinsmith/tinsmith.toml}
{{- if .Values.valkey.bundled }}
{{ include "tinsmith.secret" (dict "root" . "name" "VALKEY_PASSWORD" "key" "valkey-password") }}
- name: TINSMITH_REDIS_URL
  value: redis://:$(VALKEY_PASSWORD)@{{ include "tinsmith.name" (dict "root" . "component" "valkey") }}:6379/0
- name: TINSMITH_BROKER_URL
  value: redis://:$(VALKEY_PASSWORD)@{{ include "tinsmith.name" (dict "root" . "component" "broker") }}:6379/0
{{- else }}
{{ include "tinsmith.secret" (dict "root" . "name" "TINSMITH_REDIS_URL" "key" "redis-url") }}
{{ include "tinsmith.secret" (dict "root" . "name" "TINSMITH_BROKER_URL" "key" "broker-url") }}
{{- end }}
{{ include "tinsmith.secret" (dict "root" . "name" "TINSMITH_S3_ACCESS_KEY" "key" "s3-access-key") }}
{{ include "tinsmith.secret" (dict "root" . "name" "TINSMITH_S3_SECRET_KEY" "key" "s3-secret-key") }}
{{ include "tinsmith.secret" (dict "root" . "name" "TINSMITH_URL_SECRET" "key" "url-secret") }}
{{ include "tinsmith.secret" (dict "root" . "name" "TINSMITH_CAPTURE_SECRET" "key" "capture-secret" "optional" true) }}
{{ include "tinsmith.secret" (dict "root" . "name" "OTEL_EXPORTER_OTLP_HEADERS" "key" "otlp-headers" "optional" true) }}
{{- end }}

{{/* A variable from the Secret. Without an optional key of the Secret, the variable is not set. */}}
{{- define "tinsmith.secret" -}}
- name: {{ .name }}
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: {{ .key }}{{ if .optional }}, optional: true{{ end }}}}
{{- end }}

{{/* The variables of the values, by name. */}}
{{- define "tinsmith.variables" -}}
{{- range $key := keys (default dict .) | sortAlpha }}
- {name: {{ $key | quote }}, value: {{ get $ $key | quote }}}
{{- end }}
{{- end }}

{{/* The mounts of the containers of the API and of the workers. */}}
{{- define "tinsmith.mounts" -}}
- {name: settings, mountPath: /etc/tinsmith, readOnly: true}
- {name: data, mountPath: /var/lib/tinsmith}
- {name: tmp, mountPath: /tmp}
{{- if .Values.models }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "tinsmith.volumes" -}}
- name: settings
  configMap: {name: {{ include "tinsmith.name" (dict "root" . "component" "settings") }}}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 64Mi}
{{- with .Values.models }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The fields that all pods with our images have. */}}
{{- define "tinsmith.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "tinsmith.podSecurity" 10001 | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Pods start again when the settings change. */}}
{{- define "tinsmith.checksum" -}}
checksum/settings: {{ include "tinsmith.settings" . | sha256sum }}
{{- end }}
