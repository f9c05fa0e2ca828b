{{/* How the pods of this chart call the server: variables, flags and files of the command line. */}}

{{- define "moorage.clientEnv" -}}
- name: MOORAGE_SERVER
  value: {{ include "moorage.address" . | quote }}
{{- with .Values.client.tokenSecret }}
- name: MOORAGE_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . | quote }}, key: {{ $.Values.client.tokenKey | quote }}}
{{- if not $.Values.tls.existingSecret }}
# Without TLS the token is as safe as the cluster's network.
- name: MOORAGE_PLAINTEXT_TOKEN
  value: "1"
{{- end }}
{{- end }}
{{- end -}}

{{- define "moorage.clientFlags" -}}
{{- if .Values.tls.existingSecret -}}
--ca=/etc/moorage/server-ca/ca.crt
{{- if .Values.client.certSecret }} --cert=/etc/moorage/client/tls.crt --key=/etc/moorage/client/tls.key{{ end }}
{{- end -}}
{{- end -}}

{{- define "moorage.clientSecrets" -}}
{{- if .Values.tls.existingSecret }}
{{- $ca := default .Values.tls.existingSecret .Values.client.caSecret }}
- {directory: server-ca, secret: {{ quote $ca }}, files: {ca.crt: {{ quote .Values.client.caKey }}}}
{{- with .Values.client.certSecret }}
- {directory: client, secret: {{ quote . }}, files: {tls.crt: tls.crt, tls.key: tls.key}}
{{- end }}
{{- end }}
{{- end -}}
