{{/* The pod that has the HTTP port: a whole server, or the router of ranks on other nodes. */}}
{{- define "millrace.serverPod" -}}
{{- $spread := include "millrace.spread" . -}}
metadata:
  {{- include "millrace.podMetadata" (merge (dict "component" "server" "isServer" true) .) | nindent 2 }}
spec:
  terminationGracePeriodSeconds: {{ include "millrace.graceSeconds" . }}
  {{- include "millrace.pod" . | nindent 2 }}
  containers:
    - name: millrace
      {{- include "millrace.container" . | nindent 6 }}
      {{- if $spread }}
      # $0 is the first of args. Kubernetes leaves a name in $( ) that it does not know as it is.
      command:
        - sh
        - -c
        - {{ include "millrace.routerScript" . | quote }}
      {{- end }}
      args:
        {{- if $spread }}
        - millrace-launcher
        {{- end }}
        {{- include "millrace.flags" (dict "root" . "isRanks" false) | trim | nindent 8 }}
        {{- if not $spread }}
        - --num-shard={{ .Values.ranks }}
        {{- else if include "millrace.tlsSecret" . }}
        - --shard-tls-cert=/etc/millrace/tls/tls.crt
        - --shard-tls-key=/etc/millrace/tls/tls.key
        - --shard-tls-ca=/etc/millrace/tls/ca.crt
        {{- end }}
        {{- if .Values.apiKeyFile.secretName }}
        - --api-key-file=/etc/millrace/keys/{{ .Values.apiKeyFile.key }}
        {{- end }}
      env:
        {{- include "millrace.env" . | nindent 8 }}
        {{- with .Values.secretName }}
        - name: API_KEY
          valueFrom: {secretKeyRef: {name: {{ . }}, key: api-key, optional: true}}
        - name: ADMIN_KEY
          valueFrom: {secretKeyRef: {name: {{ . }}, key: admin-key, optional: true}}
        {{- end }}
      ports:
        - {name: http, containerPort: {{ .Values.port }}}
        {{- range include "millrace.eventPorts" . | fromJsonArray }}
        - {name: {{ .name }}, containerPort: {{ .port }}}
        {{- end }}
      resources:
        {{- if $spread }}
        {{- toYaml .Values.routerResources | nindent 8 }}
        {{- else }}
        {{- include "millrace.resources" . | nindent 8 }}
        {{- end }}
      # The port opens once the model is loaded.
      startupProbe:
        httpGet: {path: /livez, port: http}
        periodSeconds: 10
        failureThreshold: {{ div (add .Values.startupSeconds 9) 10 }}
      # 503 once shards have not come back for --recovery-grace.
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      # 503 while shards recover: new requests go to other replicas, and streams stay.
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 1
      {{- if and .Values.preStopSeconds (not (get .Values.flags "drain-delay")) }}
      lifecycle:
        preStop: {sleep: {seconds: {{ .Values.preStopSeconds }}}}
      {{- end }}
      volumeMounts:
        {{- include "millrace.mounts" (merge (dict "isServer" true) .) | nindent 8 }}
  volumes:
    {{- include "millrace.volumes" (merge (dict "isServer" true) .) | nindent 4 }}
{{- end -}}

{{/* Pod NAME-0 of LeaderWorkerSet NAME has the address NAME-0.NAME.NAMESPACE, and its first worker NAME-0-1.NAME.NAMESPACE. */}}
{{- define "millrace.addresses" -}}
leader=${LWS_LEADER_ADDRESS%%.*} domain=${LWS_LEADER_ADDRESS#*.};
{{- end -}}

{{- define "millrace.routerScript" -}}
{{- $addresses := list -}}
{{- $each := int .Values.ranksPerNode -}}
{{- range $rank := until (int .Values.ranks) -}}
{{- $addresses = append $addresses (printf "$leader-%d.$domain:%d" (add 1 (div $rank $each)) (add 9000 (mod $rank $each))) -}}
{{- end -}}
{{ include "millrace.addresses" . }} exec "$0" "$@" --remote-shards="{{ join "," $addresses }}"
{{- end -}}

{{/* Worker 1 has rank 0, at which all ranks meet. */}}
{{- define "millrace.ranksScript" -}}
{{ include "millrace.addresses" . }} exec "$0" shards "$@" --master-addr="$leader-1.$domain" --first-rank=$((LWS_WORKER_INDEX * {{ .Values.ranksPerNode }} - {{ .Values.ranksPerNode }}))
{{- end -}}

{{/* Ports of KV-cache events that the flags name, as JSON: name and port of each. */}}
{{- define "millrace.eventPorts" -}}
{{- $ports := list -}}
{{- range $flag := list "kv-events" "kv-events-replay" -}}
{{- with regexFind "[0-9]+$" (toString (get $.Values.flags $flag)) -}}
{{- $ports = append $ports (dict "name" $flag "port" (int .)) -}}
{{- end -}}
{{- end -}}
{{ toJson $ports }}
{{- end -}}
