{{/*
Worker groups: each one of .Values.workerGroups over .Values.workerGroupDefaults, as a YAML map.
*/}}
{{- define "paceline.groups" -}}
{{- $groups := dict -}}
{{- range $name, $group := .Values.workerGroups -}}
{{- if $group -}}
{{- $_ := set $groups $name (mergeOverwrite (deepCopy $.Values.workerGroupDefaults) (deepCopy $group)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end -}}

{{/* Whether an application is deployed; call with (dict "root" $ "role" ROLE). */}}
{{- define "paceline.isDeployed" -}}
{{- if or (ne .role "drafter") .root.Values.applications.drafter.enabled -}}true{{- end -}}
{{- end -}}

{{/* Most replicas that an application may have. */}}
{{- define "paceline.maxReplicas" -}}
{{- $deployment := . -}}
{{- if $deployment.autoscaling_config -}}
{{- int (default 1 $deployment.autoscaling_config.max_replicas) -}}
{{- else -}}
{{- int (default 1 $deployment.num_replicas) -}}
{{- end -}}
{{- end -}}

{{/* Seconds from SIGTERM to SIGKILL: what preStop sleeps, what drains, and a margin to end processes. */}}
{{- define "paceline.terminationGraceSeconds" -}}
{{- add (int (default 0 .preStopSleepSeconds)) (int .drainSeconds) 15 -}}
{{- end -}}
