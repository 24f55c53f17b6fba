{{/* Names, labels and the image. KubeRay wants names that are DNS labels of at most 47 characters. */}}

{{- define "paceline.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 47 | trimSuffix "-" -}}
{{- end }}

{{- define "paceline.fullname" -}}
{{- $name := include "paceline.name" . -}}
{{- $full := .Values.fullnameOverride | default (contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name)) -}}
{{- $full = $full | trunc 47 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) -}}
{{- fail (printf "the name %q must begin with a letter and hold only a-z, 0-9 and -; set fullnameOverride" $full) -}}
{{- end -}}
{{- $full -}}
{{- end }}

{{- define "paceline.selector" -}}
app.kubernetes.io/name: {{ include "paceline.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* For objects. Pods carry the selector alone: a label with a version would make every upgrade a new cluster. */}}
{{- define "paceline.labels" -}}
{{ include "paceline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* metadata of an object: (list $ "suffix" labels annotations), the last two may be left out */}}
{{- define "paceline.metadata" -}}
{{- $root := index . 0 -}}
{{- $suffix := index . 1 -}}
{{- $labels := dict -}}
{{- $annotations := deepCopy $root.Values.commonAnnotations -}}
{{- if gt (len .) 2 }}{{ $labels = index . 2 }}{{ end -}}
{{- if gt (len .) 3 }}{{ $annotations = merge (deepCopy (index . 3)) $annotations }}{{ end -}}
name: {{ include "paceline.fullname" $root }}{{ with $suffix }}-{{ . }}{{ end }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- merge (deepCopy $labels) (include "paceline.labels" $root | fromYaml) | toYaml | nindent 2 }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "paceline.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.engine.device) }}
{{- end -}}
{{- end }}

{{- define "paceline.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "paceline.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{/* Names of secrets: one that exists, or the one this chart makes; empty when there is none. */}}
{{- define "paceline.keySecret" -}}
{{- if .Values.auth.enabled -}}
{{ .Values.auth.existingSecret | default (printf "%s-api-keys" (include "paceline.fullname" .)) }}
{{- end -}}
{{- end }}

{{- define "paceline.hfSecret" -}}
{{- with .Values.hfToken -}}
{{- if .existingSecret -}}
{{ .existingSecret }}
{{- else if .value -}}
{{ include "paceline.fullname" $ }}-hf-token
{{- end -}}
{{- end -}}
{{- end }}

{{- define "paceline.serveService" -}}
{{ include "paceline.fullname" . }}-serve-svc
{{- end }}

{{/* Whether requests can come from beyond the cluster. */}}
{{- define "paceline.isExposed" -}}
{{- if or .Values.ingress.enabled .Values.httpRoute.enabled (ne .Values.service.type "ClusterIP") -}}
true
{{- end -}}
{{- end }}

{{/* Contradictions that a schema cannot name; included once, by the RayService. */}}
{{- define "paceline.check" -}}
{{- $v := .Values -}}
{{- if and (include "paceline.isExposed" .) (not $v.auth.enabled) (not $v.auth.allowAnonymous) -}}
{{- fail "requests can come from beyond the cluster, but auth.enabled is false: give API keys (auth.existingSecret), or set auth.allowAnonymous" -}}
{{- end -}}
{{- if and $v.auth.enabled (not $v.auth.existingSecret) (not $v.auth.keys) -}}
{{- fail "auth.enabled needs auth.existingSecret (a secret that holds the keys) or auth.keys" -}}
{{- end -}}
{{- if and (eq $v.upgrade.type "NewClusterWithIncrementalUpgrade") (or $v.ingress.enabled $v.httpRoute.enabled) -}}
{{- fail "with upgrade.type NewClusterWithIncrementalUpgrade KubeRay makes the Gateway and its routes; disable ingress and httpRoute" -}}
{{- end -}}
{{- if and (eq $v.upgrade.type "NewClusterWithIncrementalUpgrade") (not $v.upgrade.incremental.gatewayClassName) -}}
{{- fail "upgrade.type NewClusterWithIncrementalUpgrade needs upgrade.incremental.gatewayClassName" -}}
{{- end -}}
{{- if and $v.gcsFaultTolerance.enabled (eq $v.gcsFaultTolerance.backend "redis") (not $v.gcsFaultTolerance.redis.address) -}}
{{- fail "gcsFaultTolerance.backend redis needs gcsFaultTolerance.redis.address (host:port)" -}}
{{- end -}}
{{- if and $v.grpc.enabled (not $v.haproxy.enabled) -}}
{{- fail "grpc.enabled needs haproxy.enabled: Serve's own proxy does not tell that a client cancelled" -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: the Gateway that routes" -}}
{{- end -}}
{{- if and $v.batch.jobs (not $v.batch.existingClaim) -}}
{{- fail "batch.jobs needs batch.existingClaim: the volume that holds input and output" -}}
{{- end -}}
{{- if and $v.autoscaling.enabled (gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" -}}
{{- end -}}
{{- end }}
