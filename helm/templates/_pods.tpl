{{/*
Pod templates of Ray. Whatever stands here is part of what KubeRay hashes: a change makes it build a
second cluster and move over. So nothing here depends on the chart's version, on time or on chance.
*/}}

{{/* Labels by which policies, monitors, budgets and services find Ray's pods; never ray.io/cluster,
     whose value changes with every cluster. Call with (dict "root" $ "component" COMPONENT). */}}
{{- define "paceline.podLabels" -}}
{{ include "paceline.selectorLabels" .root }}
app.kubernetes.io/component: {{ .component | quote }}
{{- end -}}

{{/* Selects all of Ray's pods of this release, and nothing else that the chart makes. */}}
{{- define "paceline.raySelector" -}}
matchLabels:
  {{- include "paceline.selectorLabels" . | nindent 2 }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [head, router, verifier, drafter]
{{- end -}}

{{/* Environment of every Ray container; call with (dict "root" $ "drainSeconds" N "env" LIST). */}}
{{- define "paceline.env" -}}
{{- $values := .root.Values -}}
# On SIGTERM Ray moves the node's work away for this long before it ends processes.
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: {{ .drainSeconds | int | quote }}
- name: HOME
  value: /home/paceline
- name: PACELINE_CACHE
  value: {{ $values.modelCache.mountPath | quote }}
- name: HF_HOME
  value: {{ printf "%s/huggingface" $values.modelCache.mountPath | quote }}
{{- if $values.hubToken.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $values.hubToken.existingSecret | quote }}
      key: {{ $values.hubToken.key | quote }}
{{- end }}
{{- with $values.ray.env }}
{{ toYaml . }}
{{- end }}
{{- with .env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Writable places of a pod whose root is read-only. */}}
{{- define "paceline.scratchVolumes" -}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
{{- end -}}
{{- define "paceline.scratchMounts" -}}
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/paceline
{{- end -}}

{{- define "paceline.cacheVolume" -}}
- name: model-cache
  {{- if eq .Values.modelCache.type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ include "paceline.cacheClaim" . | quote }}
  {{- else if eq .Values.modelCache.type "hostPath" }}
  hostPath:
    path: {{ .Values.modelCache.hostPath | quote }}
    type: DirectoryOrCreate
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.modelCache.size | quote }}
  {{- end }}
{{- end -}}

{{/* Secrets that a role's pods hold, and no more than that. */}}
{{- define "paceline.secretVolumes" -}}
{{- if .root.Values.memberToken.enabled }}
- name: member-token
  secret:
    secretName: {{ include "paceline.memberTokenSecret" .root | quote }}
    items: [{key: token, path: token}]
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "paceline.tlsSecret" . | quote }}
    items:
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      - {key: ca.crt, path: ca.crt}
{{- end }}
{{- if and .root.Values.apiKeys.enabled (eq .role "router") }}
- name: api-keys
  secret:
    secretName: {{ include "paceline.apiKeysSecret" .root | quote }}
    items: [{key: keys.yaml, path: keys.yaml}]
{{- end }}
{{- end -}}
{{- define "paceline.secretMounts" -}}
{{- if .root.Values.memberToken.enabled }}
- name: member-token
  mountPath: /etc/paceline/member-token
  readOnly: true
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  mountPath: /etc/paceline/tls
  readOnly: true
{{- end }}
{{- if and .root.Values.apiKeys.enabled (eq .role "router") }}
- name: api-keys
  mountPath: /etc/paceline/api-keys
  readOnly: true
{{- end }}
{{- end -}}

{{/* cpu, memory and GPUs, requests equal to limits: Ray takes its idea of the node from the limits,
     and a pod whose limit is over its request is the first to be evicted. */}}
{{- define "paceline.resources" -}}
{{- $amounts := dict "cpu" (.cpu | toString) "memory" .memory -}}
{{- with .ephemeralStorage }}{{- $_ := set $amounts "ephemeral-storage" . -}}{{- end -}}
{{- with .gpu -}}{{- if gt (int .count) 0 -}}{{- $_ := set $amounts .resourceName (int .count | toString) -}}{{- end -}}{{- end -}}
requests:
  {{- toYaml $amounts | nindent 2 }}
limits:
  {{- toYaml $amounts | nindent 2 }}
{{- end -}}

{{/* Where pods go: the raw scheduling fields of a group or of the head. */}}
{{- define "paceline.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* A probe of Ray's agent on this node: the raylet lives, and on the head the control service. */}}
{{- define "paceline.rayletProbe" -}}
httpGet:
  path: /api/healthz
  port: {{ (include "paceline.ports" . | fromYaml).agent }}
{{- end -}}

{{- define "paceline.headTemplate" -}}
{{- $ports := include "paceline.ports" . | fromYaml -}}
{{- $head := .Values.head -}}
metadata:
  labels:
    {{- include "paceline.podLabels" (dict "root" . "component" "head") | nindent 4 }}
    {{- with $head.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # The node autoscaler must not move the one pod that everything reports to.
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    {{- with $head.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "paceline.headServiceAccountName" . | quote }}
  automountServiceAccountToken: {{ .Values.autoscaler.enabled }}
  terminationGracePeriodSeconds: {{ include "paceline.terminationGraceSeconds" $head }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  {{- include "paceline.scheduling" $head | nindent 2 }}
  containers:
    - name: ray-head
      image: {{ include "paceline.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      ports:
        - {name: gcs-server, containerPort: {{ $ports.gcs }}}
        - {name: dashboard, containerPort: {{ $ports.dashboard }}}
        - {name: metrics, containerPort: {{ $ports.metrics }}}
        - {name: serve, containerPort: {{ $ports.http }}}
      env:
        {{- include "paceline.env" (dict "root" . "drainSeconds" $head.drainSeconds "env" $head.env) | nindent 8 }}
      resources:
        {{- include "paceline.resources" $head | nindent 8 }}
      startupProbe:
        {{- include "paceline.rayletProbe" . | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 60
      livenessProbe:
        {{- include "paceline.rayletProbe" . | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 12
      readinessProbe:
        {{- include "paceline.rayletProbe" . | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      securityContext:
        {{- toYaml .Values.containerSecurityContext | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        {{- include "paceline.scratchMounts" . | nindent 8 }}
        - name: shm
          mountPath: /dev/shm
  volumes:
    {{- include "paceline.scratchVolumes" . | nindent 4 }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $head.shmSize | quote }}
{{- end -}}

{{/* The pod template of a worker group; call with (dict "root" $ "name" NAME "group" GROUP). */}}
{{- define "paceline.workerTemplate" -}}
{{- $ports := include "paceline.ports" .root | fromYaml -}}
{{- $group := .group -}}
{{- $role := $group.role -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "paceline.podLabels" (dict "root" .root "component" $role) | nindent 4 }}
    paceline-group: {{ .name | quote }}
    {{- with $group.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $group.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "paceline.serviceAccountName" .root | quote }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ include "paceline.terminationGraceSeconds" $group }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
    sysctls:
      # Keeps the members' ports out of those that the kernel gives to any socket.
      - name: net.ipv4.ip_local_reserved_ports
        value: {{ printf "%d-%d" (int $ports.verifier) (int $ports.router) | quote }}
  {{- include "paceline.scheduling" $group | nindent 2 }}
  {{- with $group.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $group.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    - labelSelector:
        matchLabels:
          {{- include "paceline.podLabels" (dict "root" $.root "component" $role) | nindent 10 }}
      {{- toYaml . | nindent 6 }}
    {{- end }}
  {{- end }}
  containers:
    - name: ray-worker
      image: {{ include "paceline.image" .root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      ports:
        - {name: metrics, containerPort: {{ $ports.metrics }}}
        - {name: serve, containerPort: {{ $ports.http }}}
        - {name: members, containerPort: {{ index $ports $role }}}
      env:
        {{- include "paceline.env" (dict "root" .root "drainSeconds" $group.drainSeconds "env" $group.env) | nindent 8 }}
      resources:
        {{- include "paceline.resources" $group | nindent 8 }}
      startupProbe:
        {{- if $group.probes.startup }}
        {{- toYaml $group.probes.startup | nindent 8 }}
        {{- else }}
        {{- include "paceline.rayletProbe" .root | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 60
        {{- end }}
      livenessProbe:
        {{- if $group.probes.liveness }}
        {{- toYaml $group.probes.liveness | nindent 8 }}
        {{- else }}
        # Replicas that are stuck are Serve's to restart; this one is about the node.
        {{- include "paceline.rayletProbe" .root | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 12
        {{- end }}
      readinessProbe:
        {{- if $group.probes.readiness }}
        {{- toYaml $group.probes.readiness | nindent 8 }}
        {{- else if eq $role "router" }}
        # Through Serve's proxy: the answer is 200 once a router runs and a verifier's model is warm.
        httpGet:
          path: /health/ready
          port: {{ $ports.http }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
        {{- else }}
        # Nothing of HTTP is sent here, so nothing of HTTP is asked: Serve has no proxy on a node
        # without replicas.
        {{- include "paceline.rayletProbe" .root | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
        {{- end }}
      {{- if gt (int $group.preStopSleepSeconds) 0 }}
      lifecycle:
        preStop:
          exec:
            # Clients' connections keep coming until every node has heard that the pod goes.
            command: [sleep, {{ $group.preStopSleepSeconds | int | quote }}]
      {{- end }}
      securityContext:
        {{- toYaml $values.containerSecurityContext | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        {{- include "paceline.scratchMounts" .root | nindent 8 }}
        - name: shm
          mountPath: /dev/shm
        - name: model-cache
          mountPath: {{ $values.modelCache.mountPath | quote }}
        {{- include "paceline.secretMounts" (dict "root" .root "role" $role) | nindent 8 }}
        {{- with $group.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "paceline.scratchVolumes" .root | nindent 4 }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $group.shmSize | quote }}
    {{- include "paceline.cacheVolume" .root | nindent 4 }}
    {{- include "paceline.secretVolumes" (dict "root" .root "role" $role) | nindent 4 }}
    {{- with $group.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
