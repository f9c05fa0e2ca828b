{{/* Names */}}

{{- define "moorage.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "moorage.serviceAccountName" -}}
{{- default (ternary (include "moorage.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* host:port of the API inside the cluster; the name is one that the certificate must hold. */}}
{{- define "moorage.address" -}}
{{ include "moorage.fullname" . }}.{{ .Release.Namespace }}.svc:{{ .Values.service.port }}
{{- end -}}

{{/* Labels: called with (list $ "component") */}}

{{- define "moorage.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "moorage.labels" -}}
{{- $root := index . 0 -}}
{{ include "moorage.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Pods */}}

{{- define "moorage.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "moorage.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where pods of one kind may run: called with the values that hold nodeSelector, tolerations and affinity. */}}
{{- define "moorage.scheduling" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $ $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Seconds from the decision to stop a pod to the end of the server's own grace. */}}
{{- define "moorage.stopSeconds" -}}
{{- $shutdown := default dict .Values.config.shutdown -}}
{{- $own := addf (default 0 (get $shutdown "pre_stop_delay_s")) (dig "grace_s" 10 $shutdown) -}}
{{- add .Values.preStopSleepSeconds (ceil $own) -}}
{{- end -}}

{{- define "moorage.terminationGracePeriodSeconds" -}}
{{- default (add (include "moorage.stopSeconds" . | int) 10) .Values.terminationGracePeriodSeconds -}}
{{- end -}}
