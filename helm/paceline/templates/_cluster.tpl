{{/* A Ray cluster: the spec that RayService and RayJob share.

     One Ray container per pod, first in the list, as KubeRay wants it; KubeRay adds the start command, the
     probes, the variables of token authentication and, for autoscaling, a sidecar. */}}

{{/* Values of a worker group: (list $ own), where each own value replaces the one that groups share. */}}
{{- define "paceline.node" -}}
{{- $node := deepCopy (index . 0).Values.worker -}}
{{- range $name, $value := index . 1 }}{{ $_ := set $node $name $value }}{{ end -}}
{{- toYaml $node -}}
{{- end }}

{{/* Behind HAProxy a replica listens on the first free port of its pod, from 30000. */}}
{{- define "paceline.numReplicaPorts" -}}
{{- .Values.haproxy.enabled | ternary (int .Values.monitoring.numReplicaPorts) 0 -}}
{{- end }}

{{- define "paceline.commonEnv" -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: TOKENIZERS_PARALLELISM
  value: "false"
# On SIGTERM a node moves its replicas away before it ends.
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: {{ include "paceline.nodeDrainSeconds" . | quote }}
# One event loop: a stream that nobody reads is seen, and each token costs two wake-ups less.
- name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD
  value: "0"
- name: RAY_SERVE_GRPC_MAX_MESSAGE_SIZE
  value: {{ max 67108864 (.Values.server.maxBodyBytes | default 0 | int64) | quote }}
- name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S
  value: {{ .Values.haproxy.proxyHealthCheckPeriodSeconds | quote }}
- name: RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S
  value: {{ .Values.haproxy.proxyHealthCheckTimeoutSeconds | quote }}
{{- with .Values.haproxy }}
{{- if .enabled }}
- name: RAY_SERVE_ENABLE_HA_PROXY
  value: "1"
- name: RAY_SERVE_HAPROXY_BINARY_PATH
  value: {{ .binary }}
- name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S
  value: {{ .hardStopAfterSeconds | int | quote }}
- name: RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL
  value: {{ .healthCheckFall | int | quote }}
- name: RAY_SERVE_HAPROXY_HEALTH_CHECK_FASTINTER
  value: {{ .healthCheckFastInterval | quote }}
# A replica takes the first free port, which Prometheus reads; there is one application that could inherit it.
- name: RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT
  value: "30000"
- name: RAY_SERVE_PORT_QUARANTINE_S
  value: "0"
{{- end }}
{{- end }}
{{- with include "paceline.hfSecret" . }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.hfToken.key }}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Everything that is written: sessions and sockets under /tmp, downloads and compiled kernels in the cache. */}}
{{- define "paceline.cacheVolume" -}}
{{- $cache := .Values.cache -}}
- name: cache
  {{- if $cache.persistence.enabled }}
  persistentVolumeClaim:
    claimName: {{ $cache.persistence.existingClaim | default (printf "%s-cache" (include "paceline.fullname" .)) }}
  {{- else if $cache.sizeLimit }}
  emptyDir:
    sizeLimit: {{ $cache.sizeLimit }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}

{{/* Pod spec parts that head and workers share: (dict "root" $ "node" values "shm" size "mounts" [...] "volumes" [...]) */}}
{{- define "paceline.podCommon" -}}
{{- $v := .root.Values -}}
{{- $node := .node -}}
# Its variables would be named PACELINE_..., which are the server's options.
enableServiceLinks: false
serviceAccountName: {{ include "paceline.serviceAccountName" .root }}
terminationGracePeriodSeconds: {{ include "paceline.terminationGraceSeconds" .root }}
securityContext:
  {{- toYaml $v.podSecurityContext | nindent 2 }}
{{- with $v.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $node.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $node.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $node $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with $v.initContainers }}
initContainers:
  {{- tpl (toYaml .) $.root | nindent 2 }}
{{- end }}
volumes:
  - name: tmp
    emptyDir: {}
  - name: shared-mem
    emptyDir:
      medium: Memory
      sizeLimit: {{ .shm }}
  {{- with .volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with concat $v.extraVolumes $node.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "paceline.containerCommon" -}}
{{- $v := .root.Values -}}
{{- $node := .node -}}
image: {{ include "paceline.image" .root | quote }}
imagePullPolicy: {{ $v.image.pullPolicy }}
securityContext:
  {{- toYaml $v.securityContext | nindent 2 }}
{{- with $v.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $node.livenessProbe }}
livenessProbe:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $node.readinessProbe }}
readinessProbe:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  - name: shared-mem
    mountPath: /dev/shm
  {{- with .mounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with concat $v.extraVolumeMounts $node.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "paceline.podMetadata" -}}
{{- $v := .root.Values -}}
labels:
  {{- merge (deepCopy .node.labels) (deepCopy $v.podLabels) (include "paceline.selector" .root | fromYaml) (dict "app.kubernetes.io/component" .component) | toYaml | nindent 2 }}
{{- with merge (deepCopy .node.annotations) (deepCopy $v.podAnnotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "paceline.head" -}}
{{- $v := .root.Values -}}
{{- $common := dict "root" .root "node" $v.head "shm" "1Gi" "component" .component "volumes" (.volumes | default list) "mounts" (.mounts | default list) -}}
rayStartParams:
  # Neither replicas nor ranks run on the head: it keeps the cluster.
  {{- merge (deepCopy $v.head.rayStartParams) (dict "num-cpus" "0" "dashboard-host" "0.0.0.0" "object-store-memory" "268435456") | toYaml | nindent 2 }}
template:
  metadata:
    {{- include "paceline.podMetadata" $common | nindent 4 }}
  spec:
    automountServiceAccountToken: {{ $v.nodeAutoscaling.enabled }}
    {{- include "paceline.podCommon" $common | nindent 4 }}
    containers:
      - name: ray-head
        {{- include "paceline.containerCommon" $common | nindent 8 }}
        resources:
          {{- toYaml $v.head.resources | nindent 10 }}
        ports:
          - name: gcs-server
            containerPort: 6379
          - name: dashboard
            containerPort: 8265
          - name: metrics
            containerPort: 8080
          - name: serve
            containerPort: {{ $v.server.port }}
          {{- if $v.grpc.enabled }}
          - name: serve-grpc
            containerPort: {{ $v.grpc.port }}
          {{- end }}
        env:
          - name: HOME
            value: /tmp
          {{- include "paceline.commonEnv" .root | nindent 10 }}
          {{- with $v.head.env }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
      {{- with $v.sidecars }}
      {{- tpl (toYaml .) $.root | nindent 6 }}
      {{- end }}
{{- end }}

{{/* A worker group: (dict "root" $ "node" shared and own values merged "component" "worker" "mounts" [...] "volumes" [...]) */}}
{{- define "paceline.workers" -}}
{{- $v := .root.Values -}}
{{- $node := .node -}}
{{- $volumes := include "paceline.cacheVolume" .root | fromYamlArray -}}
{{- $mounts := list (dict "name" "cache" "mountPath" $v.cache.mountPath) -}}
{{- if $v.auth.enabled -}}
{{- $item := dict "key" $v.auth.key "path" "api-keys" -}}
{{- $volumes = append $volumes (dict "name" "api-keys" "secret" (dict "secretName" (include "paceline.keySecret" .root) "items" (list $item) "defaultMode" 288)) -}}
{{- $mounts = append $mounts (dict "name" "api-keys" "mountPath" "/etc/paceline" "readOnly" true) -}}
{{- end -}}
{{- $common := dict "root" .root "node" $node "shm" $node.shmSize "component" .component "volumes" (concat $volumes (.volumes | default list)) "mounts" (concat $mounts (.mounts | default list)) -}}
{{- $resources := deepCopy $node.resources -}}
{{- if and (eq $v.engine.device "cuda") (gt (int $node.numGpus) 0) -}}
{{- $gpus := dict $node.gpuResource (int $node.numGpus) -}}
{{- $resources = merge (dict "limits" (merge $gpus ($resources.limits | default dict))) $resources -}}
{{- end -}}
groupName: {{ $node.name }}
{{- $minReplicas := hasKey $node "minReplicas" | ternary $node.minReplicas $node.replicas }}
{{- $maxReplicas := hasKey $node "maxReplicas" | ternary $node.maxReplicas $node.replicas }}
replicas: {{ $node.replicas }}
minReplicas: {{ $v.nodeAutoscaling.enabled | ternary $minReplicas $node.replicas }}
maxReplicas: {{ $v.nodeAutoscaling.enabled | ternary $maxReplicas $node.replicas }}
numOfHosts: {{ $node.numOfHosts | default 1 }}
rayStartParams:
  # Tensors travel by shared memory and NCCL; Ray's object store holds next to nothing.
  {{- merge (deepCopy $node.rayStartParams) (dict "object-store-memory" "268435456") | toYaml | nindent 2 }}
template:
  metadata:
    {{- include "paceline.podMetadata" $common | nindent 4 }}
  spec:
    automountServiceAccountToken: false
    {{- include "paceline.podCommon" $common | nindent 4 }}
    containers:
      - name: ray-worker
        {{- include "paceline.containerCommon" $common | nindent 8 }}
        resources:
          {{- toYaml $resources | nindent 10 }}
        ports:
          - name: metrics
            containerPort: 8080
          - name: serve
            containerPort: {{ $v.server.port }}
          {{- if $v.grpc.enabled }}
          - name: serve-grpc
            containerPort: {{ $v.grpc.port }}
          {{- end }}
          {{- range $i := until (int (include "paceline.numReplicaPorts" $.root)) }}
          - name: replica-{{ $i }}
            containerPort: {{ add 30000 $i }}
          {{- end }}
        env:
          - name: HOME
            value: {{ $v.cache.mountPath }}
          - name: HF_HOME
            value: {{ $v.cache.mountPath }}/huggingface
          {{- if ne $v.model.name "default" }}
          - name: PACELINE_CACHE
            value: {{ $v.cache.mountPath }}/paceline
          {{- end }}
          {{- include "paceline.commonEnv" .root | nindent 10 }}
          {{- with $node.env }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
      {{- with $v.sidecars }}
      {{- tpl (toYaml .) $.root | nindent 6 }}
      {{- end }}
{{- end }}

{{- define "paceline.clusterOptions" -}}
{{- $v := .Values -}}
rayVersion: {{ $v.rayVersion | quote }}
authOptions:
  mode: token
  {{- with $v.rayAuth.existingSecret }}
  secretName: {{ . }}
  {{- end }}
enableInTreeAutoscaling: {{ $v.nodeAutoscaling.enabled }}
{{- if $v.nodeAutoscaling.enabled }}
autoscalerOptions:
  version: {{ $v.nodeAutoscaling.version }}
  idleTimeoutSeconds: {{ $v.nodeAutoscaling.idleTimeoutSeconds }}
  upscalingMode: {{ $v.nodeAutoscaling.upscalingMode }}
  image: {{ include "paceline.image" . | quote }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  resources:
    {{- toYaml $v.nodeAutoscaling.resources | nindent 4 }}
  securityContext:
    {{- toYaml $v.securityContext | nindent 4 }}
  env:
    - name: HOME
      value: /tmp
  volumeMounts:
    - name: tmp
      mountPath: /tmp
{{- end }}
{{- end }}

{{- define "paceline.gcsFaultTolerance" -}}
{{- with .Values.gcsFaultTolerance -}}
gcsFaultToleranceOptions:
  backend: {{ .backend }}
  {{- if eq .backend "redis" }}
  redisAddress: {{ .redis.address | quote }}
  {{- if .redis.existingSecret }}
  redisPassword:
    valueFrom:
      secretKeyRef:
        name: {{ .redis.existingSecret }}
        key: {{ .redis.passwordKey }}
  {{- with .redis.usernameKey }}
  redisUsername:
    valueFrom:
      secretKeyRef:
        name: {{ $.Values.gcsFaultTolerance.redis.existingSecret }}
        key: {{ . }}
  {{- end }}
  {{- end }}
  {{- with .externalStorageNamespace }}
  externalStorageNamespace: {{ . }}
  {{- end }}
  {{- else }}
  storage:
    {{- if .storage.claimName }}
    claimName: {{ .storage.claimName }}
    {{- else }}
    size: {{ .storage.size }}
    {{- with .storage.storageClassName }}
    storageClassName: {{ . }}
    {{- end }}
    accessModes: [ReadWriteOnce]
    {{- end }}
    deletionPolicy: {{ .storage.deletionPolicy }}
  {{- end }}
{{- end -}}
{{- end }}
