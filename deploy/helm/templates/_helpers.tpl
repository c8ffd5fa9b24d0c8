{{- define "nexrl.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "nexrl.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "nexrl.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "nexrl.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Labels that select the pods of one component of this release. Arguments: the root and the component. */}}
{{- define "nexrl.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "nexrl.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "nexrl.labels" -}}
{{- $root := index . 0 -}}
{{ include "nexrl.selector" . }}
app.kubernetes.io/part-of: nexrl
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of pods. They omit the chart's version: a label that changes with each version would restart the pods. */}}
{{- define "nexrl.podLabels" -}}
{{ include "nexrl.selector" . }}
app.kubernetes.io/part-of: nexrl
{{- with (index . 0).Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The reference of an image. Arguments: the root and the key under `images`. `images.KEY.tag` overrides `images.tag`. */}}
{{- define "nexrl.image" -}}
{{- $root := index . 0 -}}
{{- $image := index $root.Values.images (index . 1) -}}
{{- $registry := ($root.Values.global).imageRegistry | default $root.Values.images.registry -}}
{{- if $registry }}{{ $registry }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default $root.Values.images.tag | default $root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "nexrl.serviceAccountName" -}}
{{- if not (or .Values.serviceAccount.create .Values.serviceAccount.name) }}{{ fail "serviceAccount.create is false: serviceAccount.name must name one; pods of others run as the account default, which must not get the operator's rights" }}{{ end -}}
{{- .Values.serviceAccount.name | default (include "nexrl.fullname" .) -}}
{{- end }}

{{- define "nexrl.redisSecretName" -}}
{{- if .Values.redis.enabled -}}
{{- .Values.redis.existingSecret | default (printf "%s-redis" (include "nexrl.fullname" .)) -}}
{{- else -}}
{{- .Values.externalRedis.existingSecret -}}
{{- end -}}
{{- end }}

{{- define "nexrl.redisSecretKey" -}}
{{- $own := ternary .Values.redis.secretKey "password" (ne .Values.redis.existingSecret "") -}}
{{- ternary $own .Values.externalRedis.secretKey .Values.redis.enabled -}}
{{- end }}

{{/* "name/key" of the Secret with the password of Redis; empty if Redis has no password. */}}
{{- define "nexrl.redisSecret" -}}
{{- with include "nexrl.redisSecretName" . }}{{ . }}/{{ include "nexrl.redisSecretKey" $ }}{{ end }}
{{- end }}

{{- define "nexrl.redisTlsSecretName" -}}
{{- if eq .Values.tls.mode "secret" -}}
{{- .Values.tls.redisSecretName | default .Values.tls.secretName -}}
{{- else -}}
{{- printf "%s-redis-tls" (include "nexrl.fullname" .) -}}
{{- end -}}
{{- end }}

{{- define "nexrl.redisUrl" -}}
{{- if and .Values.redis.enabled .Values.externalRedis.url }}{{ fail "externalRedis.url is set and redis.enabled is true: set one of them only" }}{{ end -}}
{{- if regexMatch "://[^/@]*:[^/@]*@|[?&]password=" .Values.externalRedis.url }}{{ fail "externalRedis.url holds a password, and the Deployment would show it: put it into a Secret and name that in externalRedis.existingSecret" }}{{ end -}}
{{- if .Values.redis.enabled -}}
{{- $host := printf "%s-redis.%s.svc:6379" (include "nexrl.fullname" .) .Release.Namespace -}}
{{- if eq .Values.tls.mode "off" }}redis://{{ $host }}{{ else }}rediss://{{ $host }}?ssl_ca_certs=/etc/nexrl/tls/ca.crt{{ end -}}
{{- else -}}
{{- required "redis.enabled is false: externalRedis.url must name a Redis" .Values.externalRedis.url -}}
{{- end -}}
{{- end }}

{{- define "nexrl.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "nexrl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Fields of a pod's spec that every component has. Arguments: the root and the values of the component. */}}
{{- define "nexrl.placement" -}}
{{- $values := index . 1 -}}
{{- with (index . 0).Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Allows any address, because an external Redis may be anywhere; only the port of its URL is known. */}}
{{- define "nexrl.externalRedisEgress" -}}
- ports: [{protocol: TCP, port: {{ (urlParse .Values.externalRedis.url).host | regexFind ":[0-9]+$" | trimPrefix ":" | default "6379" }}}]
{{- end }}

{{/* The ports have a default here, too: `helm upgrade --reuse-values` leaves out values that a new chart adds,
     and a rule without ports allows all ports. */}}
{{- define "nexrl.apiServerEgress" -}}
- ports:
    {{- range .Values.networkPolicy.apiServerPorts | default (list 443 6443) }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
  {{- with .Values.networkPolicy.apiServer }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* What pods of experiments may call besides each other and DNS: Redis, the API server, and networkPolicy.experimentEgress. */}}
{{- define "nexrl.experimentEgress" -}}
{{- if .Values.redis.enabled }}
- to:
    - namespaceSelector:
        matchLabels: {kubernetes.io/metadata.name: {{ .Release.Namespace | quote }}}
      podSelector:
        matchLabels: {{- include "nexrl.selector" (list . "redis") | nindent 10 }}
  ports: [{protocol: TCP, port: 6379}]
{{- else }}
{{ include "nexrl.externalRedisEgress" . }}
{{- end }}
{{ include "nexrl.apiServerEgress" . }}
{{- with .Values.networkPolicy.experimentEgress }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Another owner of the CRD Experiment, in words; empty if there is none. Helm fails if two releases have the same object, so this
     release then leaves the CRD out. */}}
{{- define "nexrl.definitionOwner" -}}
{{- with lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "experiments.nexrl.dev" }}
{{- $annotations := .metadata.annotations | default dict }}
{{- $name := get $annotations "meta.helm.sh/release-name" }}
{{- $namespace := get $annotations "meta.helm.sh/release-namespace" }}
{{- if not $name }}somebody who installed it without Helm
{{- else if or (ne $name $.Release.Name) (ne $namespace $.Release.Namespace) }}the release {{ $name }} of namespace {{ $namespace }}
{{- end }}
{{- end }}
{{- end }}
