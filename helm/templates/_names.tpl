{{/*
Names and labels. Labels of Ray pods hold nothing that changes with the chart's version, because
any change in a pod template makes KubeRay build a second cluster.
*/}}

{{- define "paceline.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* KubeRay adds up to 16 characters to the name of a RayService, which must be a DNS label. */}}
{{- define "paceline.fullname" -}}
{{- $name := include "paceline.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full = default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- if regexMatch "^[0-9]" $full -}}{{- $full = printf "p%s" $full | trunc 40 | trimSuffix "-" -}}{{- end -}}
{{- $full | replace "." "-" -}}
{{- end -}}

{{/* Of the release, on whatever it owns; the same in every version of the chart. */}}
{{- define "paceline.selectorLabels" -}}
app.kubernetes.io/name: {{ include "paceline.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* On the chart's own objects. */}}
{{- define "paceline.labels" -}}
{{ include "paceline.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | quote }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Metadata of a chart object; call with (dict "root" $ "name" NAME "annotations" MAP). */}}
{{- define "paceline.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "paceline.labels" .root | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default dict .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "paceline.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "paceline.serviceAccountName" -}}
{{- default (ternary (include "paceline.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "paceline.headServiceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- printf "%s-head" (include "paceline.fullname" .) -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.headName -}}
{{- end -}}
{{- end -}}

{{/* Secrets: the user's, or the one that the chart makes. */}}
{{- define "paceline.apiKeysSecret" -}}
{{- default (printf "%s-api-keys" (include "paceline.fullname" .)) .Values.apiKeys.existingSecret -}}
{{- end -}}
{{- define "paceline.memberTokenSecret" -}}
{{- default (printf "%s-member-token" (include "paceline.fullname" .)) .Values.memberToken.existingSecret -}}
{{- end -}}
{{- define "paceline.rayTokenSecret" -}}
{{- default (printf "%s-ray-token" (include "paceline.fullname" .)) .Values.rayToken.existingSecret -}}
{{- end -}}
{{- define "paceline.tlsSecret" -}}
{{- default (printf "%s-tls-%s" (include "paceline.fullname" .root) .role) (index .root.Values.tls.existingSecrets .role) -}}
{{- end -}}
{{- define "paceline.cacheClaim" -}}
{{- default (printf "%s-model-cache" (include "paceline.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end -}}

{{/* Ports that are part of the product; probes, policies and certificates rely on them. */}}
{{- define "paceline.ports" -}}
http: 8000
metrics: 8080
gcs: 6379
dashboard: 8265
agent: 52365
verifier: 50051
drafter: 50052
router: 50053
{{- end -}}
