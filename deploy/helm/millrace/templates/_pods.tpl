{{/* The flags as a list of arguments. Of: root, and isRanks where only those of ranks are wanted. */}}
{{- define "millrace.flags" -}}
{{- $known := splitList "\n" (.root.Files.Get "files/rank-flags.txt" | trim) -}}
{{- $isRanks := .isRanks -}}
{{- with .root.Values.model.id }}
- {{ printf "--model-id=%s" . | quote }}
{{- end }}
{{- with .root.Values.model.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
{{- if or $isRanks (not (include "millrace.spread" .root)) }}
- --device={{ .root.Values.device }}
{{- end }}
{{- range $name, $value := .root.Values.flags }}
{{- if or (not $isRanks) (has $name $known) }}
{{- if and (kindIs "bool" $value) (has $name (list "log-colorize" "sharded")) }}
- --{{ $name }}={{ $value }}
{{- else if kindIs "bool" $value }}
{{- if $value }}
- --{{ $name }}
{{- end }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $name (include "millrace.text" .) | quote }}
{{- end }}
{{- else }}
- {{ printf "--%s=%s" $name (include "millrace.text" $value) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "millrace.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{/* What every container has. */}}
{{- define "millrace.container" -}}
image: {{ include "millrace.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
{{- end -}}

{{- define "millrace.env" -}}
- name: PORT
  value: {{ .Values.port | quote }}
{{- with .Values.secretName }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: hf-token, optional: true}}
{{- end }}
{{- range .Values.env }}
{{- if has .name (list "GRACEFUL_TERMINATION_TIMEOUT" "DRAIN_DELAY") }}
{{- fail (printf "env: %s belongs into flags, from which the grace period of the pods is computed" .name) }}
{{- end }}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "millrace.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if eq .Values.device "cuda" -}}
{{- $gpus := min (int .Values.ranks) (int .Values.ranksPerNode) -}}
{{- $limits := merge (dict .Values.gpuResource $gpus) (default dict $resources.limits) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "millrace.mounts" -}}
- {name: data, mountPath: /data}
- {name: shm, mountPath: /dev/shm}
{{- if and .Values.apiKeyFile.secretName .isServer }}
- {name: keys, mountPath: /etc/millrace/keys, readOnly: true}
{{- end }}
{{- if include "millrace.spread" . }}
{{- if include "millrace.tlsSecret" . }}
- {name: tls, mountPath: /etc/millrace/tls, readOnly: true}
{{- end }}
{{- end }}
{{- with .Values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "millrace.volumes" -}}
- name: data
{{- if .Values.cache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.cache.existingClaim }}}
{{- else }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .Values.cache.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources: {requests: {storage: {{ .Values.cache.size }}}}
{{- end }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.shmSize }}}
{{- if and .Values.apiKeyFile.secretName .isServer }}
# 0440: others than the pod's group may not read it.
- name: keys
  secret: {secretName: {{ .Values.apiKeyFile.secretName }}, defaultMode: 288}
{{- end }}
{{- if include "millrace.spread" . }}
{{- with include "millrace.tlsSecret" . }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 288}
{{- end }}
{{- end }}
{{- with .Values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What every pod has, but for its containers and volumes. */}}
{{- define "millrace.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- range $name := list "imagePullSecrets" "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" "topologySpreadConstraints" }}
{{- with get $.Values $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "millrace.podMetadata" -}}
labels:
  {{- include "millrace.selector" . | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- if .isServer }}
  llm-d.ai/engine-type: millrace
  {{- end }}
  {{- with .Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
