{{/* Ray's pods need one another on many ports, of which some are random. The members' own ports,
     where tokens and drafts pass, are left out, and opened below to those that have business there. */}}
{{- define "paceline.fromRay" -}}
- from:
    - podSelector:
        {{- include "paceline.raySelector" . | nindent 8 }}
  ports:
    - {protocol: TCP, port: 1, endPort: {{ sub (int (include "paceline.ports" . | fromYaml).verifier) 1 }}}
    - {protocol: TCP, port: {{ add (int (include "paceline.ports" . | fromYaml).router) 1 }}, endPort: 65535}
{{- with .Values.networkPolicy.metricsFrom }}
- from:
    {{- toYaml . | nindent 4 }}
  ports:
    - {protocol: TCP, port: {{ (include "paceline.ports" $ | fromYaml).metrics }}}
{{- end }}
{{- end -}}

{{/* Call with (dict "root" $ "roles" LIST "port" PORT). */}}
{{- define "paceline.fromRoles" -}}
- from:
    {{- range .roles }}
    - podSelector:
        matchLabels:
          {{- include "paceline.podLabels" (dict "root" $.root "component" .) | nindent 10 }}
    {{- end }}
  ports:
    - {protocol: TCP, port: {{ .port }}}
{{- end -}}
