{{- define "millrace.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "millrace.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "millrace.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "millrace.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of this release. */}}
{{- define "millrace.selector" -}}
app.kubernetes.io/name: {{ include "millrace.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* What selects the pods that have the HTTP port. */}}
{{- define "millrace.serverSelector" -}}
{{ include "millrace.selector" . }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "millrace.labels" -}}
{{ include "millrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Not empty where the ranks of a replica are on several nodes. */}}
{{- define "millrace.spread" -}}
{{- if gt (int .Values.ranks) (int .Values.ranksPerNode) -}}
{{- if mod (int .Values.ranks) (int .Values.ranksPerNode) -}}
{{- fail "ranks must be a multiple of ranksPerNode" -}}
{{- end -}}
{{- if and (not (include "millrace.tlsSecret" .)) (not (get .Values.flags "allow-insecure-tcp")) -}}
{{- fail "ranks on several nodes need tls.secretName or tls.certManager (or allow-insecure-tcp in flags, in a private network)" -}}
{{- end -}}
yes
{{- end -}}
{{- end -}}

{{- define "millrace.tlsSecret" -}}
{{- if and .Values.tls.secretName .Values.tls.certManager -}}
{{- fail "tls.secretName names a Secret that is there; leave it out with tls.certManager" -}}
{{- end -}}
{{- if .Values.tls.certManager -}}{{ include "millrace.fullname" . }}-ranks{{- else -}}{{ .Values.tls.secretName }}{{- end -}}
{{- end -}}

{{/* What autoscalers change. */}}
{{- define "millrace.target" -}}
{{- if include "millrace.spread" . -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "millrace.fullname" . }}
{{- end -}}

{{/* A number as digits: Helm has all numbers of JSON as floating-point ones. */}}
{{- define "millrace.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* Seconds from SIGTERM, or the start of preStop, to the end of the server: the launcher's margin is 10, ours 20. */}}
{{- define "millrace.graceSeconds" -}}
{{- $drain := int (default 90 (get .Values.flags "graceful-termination-timeout")) -}}
{{- if hasKey .Values.flags "graceful-termination-timeout" -}}
{{- $drain = int (get .Values.flags "graceful-termination-timeout") -}}
{{- end -}}
{{- $delay := int (ceil (float64 (default 0 (get .Values.flags "drain-delay")))) -}}
{{- if not $delay -}}{{- $delay = int .Values.preStopSeconds -}}{{- end -}}
{{- add $delay $drain 30 -}}
{{- end -}}

{{/* Refuses a rollout that cannot go on. Of: maxSurge, maxUnavailable. */}}
{{- define "millrace.checkRollout" -}}
{{- if and (has (toString .maxSurge) (list "0" "0%")) (has (toString .maxUnavailable) (list "0" "0%")) -}}
{{- fail "rollout: maxSurge and maxUnavailable cannot both be 0" -}}
{{- end -}}
{{- end -}}
