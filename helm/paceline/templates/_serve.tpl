{{/* The Serve configuration: what `serve deploy` would take. */}}

{{/* Options of cluster/config.py; what is null keeps the default that is written there. */}}
{{- define "paceline.args" -}}
{{- $v := .Values -}}
{{- $numGpus := 0 -}}
{{- if eq $v.engine.device "cuda" -}}
{{- range $v.workerGroups -}}
{{- $numGpus = max $numGpus (dig "numGpus" $v.worker.numGpus .) -}}
{{- end -}}
{{- end -}}
{{- $given := dict
  "model" $v.model.name
  "revision" $v.model.revision
  "served_model_name" $v.model.servedName
  "dtype" $v.model.dtype
  "max_model_len" $v.model.maxModelLen
  "drafter" $v.drafter.name
  "num_draft_tokens" $v.drafter.numDraftTokens
  "draft_budget" $v.drafter.draftBudget
  "context_cap" $v.drafter.contextCap
  "drafter_cache_gib" $v.drafter.cacheGiB
  "device" $v.engine.device
  "tensor_parallel_size" $v.engine.tensorParallelSize
  "gpus_per_node" (gt (int $numGpus) 0 | ternary $numGpus nil)
  "max_num_seqs" $v.engine.maxNumSeqs
  "max_num_batched_tokens" $v.engine.maxNumBatchedTokens
  "max_queued_requests" $v.engine.maxQueuedRequests
  "page_size" $v.engine.pageSize
  "kv_cache_gib" $v.engine.kvCacheGiB
  "gpu_memory_utilization" $v.engine.gpuMemoryUtilization
  "prefix_cache" $v.engine.prefixCache
  "num_threads" $v.engine.numThreads
  "step_deadline_s" $v.engine.stepDeadlineSeconds
  "start_timeout_s" $v.engine.startTimeoutSeconds
  "drain_s" $v.server.drainSeconds
  "max_body_bytes" $v.server.maxBodyBytes
  "log_level" $v.server.logLevel
  "log_format" $v.server.logFormat
  "playground" $v.server.playground
  "otlp_endpoint" $v.tracing.otlpEndpoint
  "trace_sample_ratio" $v.tracing.sampleRatio
-}}
{{- if $v.auth.enabled }}{{ $_ := set $given "api_key_file" "/etc/paceline/api-keys" }}{{ end -}}
{{- $args := dict -}}
{{- range $options := list $given $v.extraArgs -}}
{{- range $name, $value := $options -}}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $args $name $value }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toYaml $args -}}
{{- end }}

{{- define "paceline.deployment" -}}
{{- $v := .Values -}}
name: paceline
{{- if $v.autoscaling.enabled }}
autoscaling_config:
  min_replicas: {{ $v.autoscaling.minReplicas }}
  max_replicas: {{ $v.autoscaling.maxReplicas }}
  {{- with $v.autoscaling.initialReplicas }}
  initial_replicas: {{ . }}
  {{- end }}
  target_ongoing_requests: {{ $v.autoscaling.targetOngoingRequests }}
  upscale_delay_s: {{ $v.autoscaling.upscaleDelaySeconds }}
  downscale_delay_s: {{ $v.autoscaling.downscaleDelaySeconds }}
{{- else }}
num_replicas: {{ $v.replicas }}
{{- end }}
{{- with $v.maxReplicasPerNode }}
max_replicas_per_node: {{ . }}
{{- end }}
{{- end }}

{{- define "paceline.serveConfig" -}}
{{- $v := .Values -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ $v.server.port }}
{{- if $v.grpc.enabled }}
grpc_options:
  port: {{ $v.grpc.port }}
  grpc_servicer_functions:
    {{- toYaml $v.grpc.servicerFunctions | nindent 4 }}
{{- end }}
logging_config:
  encoding: {{ upper $v.server.logFormat }}
  log_level: WARNING
  enable_access_log: false
applications:
  - name: paceline
    route_prefix: /
    import_path: paceline.deploy.replica:build_app
    args:
      {{- include "paceline.args" . | nindent 6 }}
    {{- with $v.rollout }}
    runtime_env:
      env_vars:
        ROLLOUT: {{ . | quote }}
    {{- end }}
    deployments:
      - {{- include "paceline.deployment" . | nindent 8 }}
{{- end }}

{{/* The command of a batch job: (list $ job); the options of the server's front door are not the batch's.
     Two shells read it, the submitter's and the job's, so no word may need quotes. */}}
{{- define "paceline.batchCommand" -}}
{{- $root := index . 0 -}}
{{- $job := index . 1 -}}
{{- $words := list "python" "-m" "paceline.deploy.batch" $job.input $job.output "--replicas" (int $root.Values.batch.numWorkers) -}}
{{- range $name, $value := omit (include "paceline.args" $root | fromYaml) "drain_s" "max_body_bytes" "log_level" "log_format" "playground" "otlp_endpoint" "trace_sample_ratio" "api_key_file" -}}
{{- $flag := $name | replace "_" "-" -}}
{{- if kindIs "bool" $value -}}
{{- $words = append $words (printf "--%s%s" ($value | ternary "" "no-") $flag) -}}
{{- else -}}
{{- $words = concat $words (list (printf "--%s" $flag) (kindIs "float64" $value | ternary (toJson $value) $value)) -}}
{{- end -}}
{{- end -}}
{{- range concat $words ($job.args | default list) -}}
{{- if not (regexMatch "^[A-Za-z0-9_./:=@,+-]+$" (toString .)) -}}
{{- fail (printf "batch.jobs %s: %q needs quotes, which do not reach the job; use letters, digits and _./:=@,+-" $job.name (toString .)) -}}
{{- end -}}
{{- end -}}
{{- join " " (concat $words ($job.args | default list)) -}}
{{- end }}

{{/* How long things may take, in seconds, each longer than what it waits for:
     a replica's streams < Ray's drain of a node < the pod's grace < the life of a cluster that was replaced.
     45: what a replica adds to its streams (HAProxy stops sending, the engine's processes end). */}}
{{- define "paceline.nodeDrainSeconds" -}}
{{- add (int .Values.server.drainSeconds) 45 -}}
{{- end }}

{{- define "paceline.terminationGraceSeconds" -}}
{{- add (include "paceline.nodeDrainSeconds" .) 30 -}}
{{- end }}

{{- define "paceline.clusterDeletionDelaySeconds" -}}
{{- if kindIs "invalid" .Values.upgrade.clusterDeletionDelaySeconds -}}
{{- add (int .Values.server.drainSeconds) 60 -}}
{{- else -}}
{{- .Values.upgrade.clusterDeletionDelaySeconds -}}
{{- end -}}
{{- end }}
