{{/*
What a schema of single values cannot say: values that do not go together. Each message names the key
and the remedy.
*/}}
{{- define "paceline.check" -}}
{{- $groups := include "paceline.groups" . | fromYaml -}}
{{- range $name, $group := $groups -}}
{{- include "paceline.checkGroup" (dict "root" $ "name" $name "group" $group) -}}
{{- end -}}
{{- range $role := list "router" "verifier" "drafter" -}}
{{- if include "paceline.isDeployed" (dict "root" $ "role" $role) -}}
{{- include "paceline.checkApplication" (dict "root" $ "role" $role "groups" $groups) -}}
{{- end -}}
{{- end -}}
{{- $timeout := default 600 .Values.applications.router.args.request_timeout_s -}}
{{- if lt (int .Values.rayService.deletionDelaySeconds) (int $timeout) -}}
{{- fail (printf "rayService.deletionDelaySeconds is %d, but an answer may take %d s (applications.router.args.request_timeout_s) and would be cut off at an upgrade: set at least %d" (int .Values.rayService.deletionDelaySeconds) (int $timeout) (int $timeout)) -}}
{{- end -}}
{{- if not (semverCompare ">=2.60.0-0" .Values.ray.version) -}}
{{- fail (printf "ray.version is %s, but Paceline needs Ray 2.60 or later: set the version that is in the image" .Values.ray.version) -}}
{{- end -}}
{{- if and .Values.prefetch.enabled (ne .Values.modelCache.type "pvc") -}}
{{- fail "prefetch.enabled needs a cache that all pods share: set modelCache.type to pvc" -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled .Values.apiKeys.enabled (not .Values.apiKeys.adminKey) -}}
{{- fail "metrics.serviceMonitor.enabled needs an admin key, since /metrics asks for one: name the entry of the Secret that holds it in apiKeys.adminKey" -}}
{{- end -}}
{{- end -}}

{{- define "paceline.checkGroup" -}}
{{- $group := .group -}}
{{- $key := printf "workerGroups.%s" .name -}}
{{- if not $group.role -}}
{{- fail (printf "%s.role is missing: set router, verifier or drafter" $key) -}}
{{- end -}}
{{- if not (include "paceline.isDeployed" (dict "root" .root "role" $group.role)) -}}
{{- fail (printf "%s.role is %s, which applications.%s.enabled turns off: remove the group (%s: null) or turn it on" $key $group.role $group.role $key) -}}
{{- end -}}
{{- if gt (int $group.minReplicas) (int $group.maxReplicas) -}}
{{- fail (printf "%s.minReplicas is %d, over maxReplicas, which is %d: raise maxReplicas" $key (int $group.minReplicas) (int $group.maxReplicas)) -}}
{{- end -}}
{{- if and (gt (int $group.pdb.minAvailable) 0) (ge (int $group.pdb.minAvailable) (int $group.minReplicas)) -}}
{{- fail (printf "%s.pdb.minAvailable is %d, and minReplicas is %d, so no node could ever be drained: set it below minReplicas, or to 0 for no budget" $key (int $group.pdb.minAvailable) (int $group.minReplicas)) -}}
{{- end -}}
{{- $deployment := (index .root.Values.applications $group.role).deployment -}}
{{- $actor := default dict $deployment.ray_actor_options -}}
{{- $graceful := default 20 $deployment.graceful_shutdown_timeout_s -}}
{{- if lt (int $group.drainSeconds) (int $graceful) -}}
{{- fail (printf "%s.drainSeconds is %d, less than the %d s that a replica may take to stop (applications.%s.deployment.graceful_shutdown_timeout_s): set at least %d" $key (int $group.drainSeconds) (int $graceful) $group.role (int $graceful)) -}}
{{- end -}}
{{- if gt (float64 (default 0 $actor.num_gpus)) (float64 $group.gpu.count) -}}
{{- fail (printf "%s.gpu.count is %v, but a replica asks for %v (applications.%s.deployment.ray_actor_options.num_gpus): raise it" $key $group.gpu.count $actor.num_gpus $group.role) -}}
{{- end -}}
{{- if gt (float64 (ternary $actor.num_cpus 1 (hasKey $actor "num_cpus"))) (float64 $group.cpu) -}}
{{- fail (printf "%s.cpu is %v, but a replica asks for %v (applications.%s.deployment.ray_actor_options.num_cpus): raise it" $key $group.cpu $actor.num_cpus $group.role) -}}
{{- end -}}
{{- end -}}

{{- define "paceline.checkApplication" -}}
{{- $role := .role -}}
{{- $settings := index .root.Values.applications $role -}}
{{- $key := printf "applications.%s" $role -}}
{{- if and (hasKey $settings.deployment "num_replicas") (hasKey $settings.deployment "autoscaling_config") -}}
{{- fail (printf "%s.deployment has both num_replicas and autoscaling_config: set the other one to null" $key) -}}
{{- end -}}
{{- $places := 0 -}}
{{- $count := ternary "maxReplicas" "minReplicas" .root.Values.autoscaler.enabled -}}
{{- range $name, $group := .groups -}}
{{- if eq $group.role $role -}}{{- $places = add $places (int (index $group $count)) -}}{{- end -}}
{{- end -}}
{{- $wanted := int (include "paceline.maxReplicas" $settings.deployment) -}}
{{- if lt (int $places) $wanted -}}
{{- fail (printf "%s may have %d replicas, each of which takes a pod, but the workerGroups with role %s hold %d pods at most: raise their %s, or add a group with role %s" $key $wanted $role (int $places) $count $role) -}}
{{- end -}}
{{- $rpc := default dict $settings.args.rpc -}}
{{- range $name := list "port" "token_file" "tls" -}}
{{- if hasKey $rpc $name -}}
{{- fail (printf "%s.args.rpc.%s is the chart's to set: use memberToken and tls; ports are fixed, because network policies name them" $key $name) -}}
{{- end -}}
{{- end -}}
{{- if hasKey (default dict $settings.args.auth) "keys_file" -}}
{{- fail (printf "%s.args.auth.keys_file is the chart's to set: use apiKeys" $key) -}}
{{- end -}}
{{- $grace := default 0 $settings.args.drain_grace_s -}}
{{- $timeout := default 20 $settings.deployment.graceful_shutdown_timeout_s -}}
{{- if ge (float64 $grace) (float64 $timeout) -}}
{{- fail (printf "%s.args.drain_grace_s is %v, but Serve kills the replica after %v s (%s.deployment.graceful_shutdown_timeout_s): set it lower" $key $grace $timeout $key) -}}
{{- end -}}
{{- end -}}
