{{/*
The Serve config, the same as a file of cluster/serve: what .Values.applications says, and what only
the chart knows, namely where the secrets are mounted, the fixed ports, and the placement.
*/}}
{{- define "paceline.serveConfig" -}}
{{- $importPaths := dict "router" "router.app:build" "verifier" "verifier_service.app:build" "drafter" "drafter_service.app:build" -}}
{{- $applications := list -}}
{{- range $role := list "verifier" "drafter" "router" -}}
{{- if include "paceline.isDeployed" (dict "root" $ "role" $role) -}}
{{- $settings := index $.Values.applications $role -}}
{{- $options := deepCopy $settings.deployment -}}
{{- $actor := mergeOverwrite (dict "label_selector" (dict "paceline-role" $role)) (default dict $options.ray_actor_options) -}}
{{- $_ := set $options "name" (title $role) -}}
{{- $_ := set $options "max_replicas_per_node" 1 -}}
{{- $_ := set $options "ray_actor_options" $actor -}}
{{- $args := mergeOverwrite (deepCopy $settings.args) (include "paceline.secretArgs" (dict "root" $ "role" $role) | fromJson) -}}
{{- $route := ternary "/" nil (eq $role "router") -}}
{{- $applications = append $applications (dict "name" $role "route_prefix" $route "import_path" (index $importPaths $role) "args" $args "deployments" (list $options)) -}}
{{- end -}}
{{- end -}}
{{- $http := dict "host" "0.0.0.0" "port" (include "paceline.ports" . | fromYaml).http -}}
{{- $config := dict "proxy_location" "EveryNode" "http_options" $http "applications" $applications -}}
{{- with .Values.serve.loggingConfig -}}{{- $_ := set $config "logging_config" . -}}{{- end -}}
{{- toPrettyJson $config -}}
{{- end -}}

{{/* What the secrets and the fixed ports add to an application's args. */}}
{{- define "paceline.secretArgs" -}}
{{- $values := .root.Values -}}
{{- $rpc := dict "port" (index (include "paceline.ports" .root | fromYaml) .role) -}}
{{- if $values.memberToken.enabled -}}
{{- $_ := set $rpc "token_file" "/etc/paceline/member-token/token" -}}
{{- end -}}
{{- if $values.tls.enabled -}}
{{- $_ := set $rpc "tls" (dict "certificate" "/etc/paceline/tls/tls.crt" "key" "/etc/paceline/tls/tls.key" "ca" "/etc/paceline/tls/ca.crt") -}}
{{- end -}}
{{- $args := dict "rpc" $rpc -}}
{{- if and $values.apiKeys.enabled (eq .role "router") -}}
{{- $_ := set $args "auth" (dict "keys_file" "/etc/paceline/api-keys/keys.yaml") -}}
{{- end -}}
{{- toJson $args -}}
{{- end -}}
