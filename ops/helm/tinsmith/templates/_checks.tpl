{{/* These checks refuse values that Kubernetes would take, and with which nothing would run. */}}

{{/* The number of an autoscaler's pods. Give the component, and the values `minReplicas` and `maxReplicas`. */}}
{{- define "tinsmith.checkReplicas" -}}
{{- if gt (int .minReplicas) (int .maxReplicas) }}{{ fail (printf "%s: minReplicas (%v) is above maxReplicas (%v)" .component .minReplicas .maxReplicas) }}{{ end -}}
{{- end }}

{{/* The memory of a Valkey server. Give the component and its values. */}}
{{- define "tinsmith.checkMemory" -}}
{{- $limit := .values.resources.limits.memory -}}
{{- $bytes := include "tinsmith.bytes" $limit -}}
{{- if and $bytes (ge (float64 (include "tinsmith.bytes" .values.maxmemory)) (float64 $bytes)) }}{{ fail (printf "%s: maxmemory (%s) must be below the memory limit (%s)" .component .values.maxmemory (include "tinsmith.amount" $limit)) }}{{ end -}}
{{- end }}

{{/* The names of the workers' objects, of which no two may be the same. */}}
{{- define "tinsmith.checkNames" -}}
{{- $names := list -}}
{{- range include "tinsmith.workers" . | fromJsonArray }}
{{- $metrics := printf "%s-metrics" .component }}
{{- range $name := ternary (list .component $metrics) (list .component) (gt (int .nodes) 1) }}
{{- if has $name $names }}{{ fail (printf "two objects would have the name %s: choose another id" $name) }}{{ end -}}
{{- $names = append $names $name }}
{{- end }}
{{- end }}
{{- end }}

{{/* An amount as a text: YAML's large numbers are floats. */}}
{{- define "tinsmith.amount" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ int64 . }}{{ end -}}
{{- end }}

{{/* The bytes of an amount of Kubernetes or Valkey; empty in the notations that few use. */}}
{{- define "tinsmith.bytes" -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "kb" 1024 "mb" 1048576 "gb" 1073741824 -}}
{{- $amount := include "tinsmith.amount" . -}}
{{- if regexMatch "^[0-9.]+[A-Za-z]*$" $amount }}
{{- $unit := get $units (regexFind "[A-Za-z]*$" $amount) }}
{{- if $unit }}{{ mulf (float64 (regexFind "^[0-9.]+" $amount)) $unit }}{{ end -}}
{{- end }}
{{- end }}
