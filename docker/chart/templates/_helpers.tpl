{{- define "asyncrl.name" -}}
{{- $name := ternary .Release.Name (printf "%s-asyncrl" .Release.Name) (contains "asyncrl" .Release.Name) -}}
{{- $name | trunc 45 | trimSuffix "-" -}}
{{- end }}

{{- define "asyncrl.selector" -}}
app.kubernetes.io/name: asyncrl
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "asyncrl.labels" -}}
{{ include "asyncrl.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "asyncrl.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "asyncrl.secretName" -}}
{{ .Values.secret.existingSecret | default (printf "%s-agents" (include "asyncrl.name" .)) }}
{{- end }}

{{- define "asyncrl.serviceAccountName" -}}
{{ .Values.serviceAccount.name | default (include "asyncrl.name" .) }}
{{- end }}

{{- define "asyncrl.runName" -}}
{{- $run := .Values.config.run | default dict -}}
{{ $run.name | default .Release.Name }}
{{- end }}

{{/* Where agents find the controller: a name that stays when its pod is replaced. */}}
{{- define "asyncrl.controllerHost" -}}
{{ include "asyncrl.name" . }}-controller-0.{{ include "asyncrl.name" . }}-controller.{{ .Release.Namespace }}.svc
{{- end }}

{{/* The configuration of the run: the user's, with what the chart decides. */}}
{{- define "asyncrl.config.run_config" -}}
{{- $generators := .Values.generators -}}
{{- $agents := dict "listen" "0.0.0.0:5900" "control_port" 5901 "key_file" (printf "/run/secrets/asyncrl/%s" .Values.secret.key) "place_seconds" .Values.placeSeconds -}}
{{- if $generators.maxGenerators }}{{ $_ := set $agents "max_generators" (int $generators.maxGenerators) }}{{ end -}}
{{- $launcher := dict "kind" "agents" "generators" (int $generators.startWith) "agents" $agents -}}
{{- $run := dict "name" (include "asyncrl.runName" .) "directory" "/work/runs" -}}
{{- $owned := dict "run" $run "launcher" $launcher -}}
{{- if gt (int .Values.trainer.ranks) 1 -}}
{{- $_ := set $launcher "trusted_network" true -}}
{{- $_ := set $owned "trainer" (dict "ranks" (int .Values.trainer.ranks) "rank_network" .Values.trainer.rankNetwork) -}}
{{- end -}}
{{- if .Values.monitoring.enabled }}{{ $_ := set $owned "monitoring" (dict "metrics" true "host" "0.0.0.0" "port" 9100) }}{{ end -}}
{{- mergeOverwrite (deepCopy .Values.config) $owned | toYaml -}}
{{- end }}

{{/* One key of `pod`, with that of the role: lists are joined, maps merged. */}}
{{- define "asyncrl.podList" -}}
{{- $both := concat (index .all .key | default list) (index .role .key | default list) -}}
{{- if $both }}{{ toYaml $both }}{{ end -}}
{{- end }}
{{- define "asyncrl.podMap" -}}
{{- $both := mergeOverwrite (deepCopy (index .all .key | default dict)) (index .role .key | default dict) -}}
{{- if $both }}{{ toYaml $both }}{{ end -}}
{{- end }}

{{/* What all pods have: root = the context, role = controllerPod or generatorPod. */}}
{{- define "asyncrl.podSpec" -}}
{{- $all := .root.Values.pod -}}
{{- $role := .role -}}
serviceAccountName: {{ include "asyncrl.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "priorityClassName" "runtimeClassName" }}
{{- with index $role $key | default (index $all $key) }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- range $key := list "nodeSelector" "affinity" }}
{{- with include "asyncrl.podMap" (dict "all" $all "role" $role "key" $key) }}
{{ $key }}:
  {{- . | nindent 2 }}
{{- end }}
{{- end }}
{{- with include "asyncrl.podList" (dict "all" $all "role" $role "key" "tolerations") }}
tolerations:
  {{- . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "asyncrl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Of a container that uses GPUs, with `capabilities` of the pods: root and role, as for podSpec. */}}
{{- define "asyncrl.gpuSecurity" -}}
{{ include "asyncrl.containerSecurity" .root }}
{{- with include "asyncrl.podList" (dict "all" .root.Values.pod "role" .role "key" "capabilities") }}
  add:
    {{- . | nindent 4 }}
{{- end }}
{{- end }}

{{/* Of a liveness probe: whoever hangs does not leave either, so less time than after a deletion of the
     pod. Kubernetes before 1.21 does not know it. */}}
{{- define "asyncrl.hangs" -}}
{{- if semverCompare ">=1.21.0-0" .Capabilities.KubeVersion.Version }}
terminationGracePeriodSeconds: 60
{{- end }}
{{- end }}

{{/* Resources of a container, with its GPUs. */}}
{{- define "asyncrl.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpus) 0 -}}
{{- $limits := $resources.limits | default dict -}}
{{- $_ := set $limits .root.Values.gpuResource (int .gpus) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{- define "asyncrl.env" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: HOME
  value: /cache
- name: XDG_CACHE_HOME
  value: /cache
- name: HF_HOME
  value: /cache/huggingface
- name: NUMBA_CACHE_DIR
  value: /cache/numba
- name: PYTHONUNBUFFERED
  value: "1"
{{- with include "asyncrl.podList" (dict "all" .root.Values.pod "role" .role "key" "env") }}
{{ . }}
{{- end }}
{{- end }}

{{- define "asyncrl.mounts" -}}
- name: runs
  mountPath: /work/runs
- name: cache
  mountPath: /cache
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
- name: secret
  mountPath: /run/secrets/asyncrl
  readOnly: true
{{- if .root.Values.files }}
- name: files
  mountPath: /work/files
  readOnly: true
{{- end }}
{{- with include "asyncrl.podList" (dict "all" .root.Values.pod "role" .role "key" "volumeMounts") }}
{{ . }}
{{- end }}
{{- end }}

{{- define "asyncrl.volumes" -}}
- name: cache
  emptyDir:
    sizeLimit: {{ .root.Values.cache }}
- name: tmp
  emptyDir:
    sizeLimit: {{ .root.Values.temporary }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .root.Values.sharedMemory }}
- name: secret
  secret:
    secretName: {{ include "asyncrl.secretName" .root }}
    defaultMode: 0440
    items:
    - key: {{ .root.Values.secret.key }}
      path: {{ .root.Values.secret.key }}
{{- if .root.Values.files }}
- name: files
  configMap:
    name: {{ include "asyncrl.name" .root }}-files
{{- end }}
{{- with include "asyncrl.podList" (dict "all" .root.Values.pod "role" .role "key" "volumes") }}
{{ . }}
{{- end }}
{{- end }}

{{/* Before the containers: the pod's cache gets what the image's has (compiled kernels), and the built-in
     model, which is trained and not downloaded; then `modelCommand`. */}}
{{- define "asyncrl.initContainers" -}}
{{- $model := .root.Values.config.model | default dict -}}
initContainers:
- name: cache
  image: {{ include "asyncrl.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python, /etc/asyncrl/fill_cache.py, {{ hasPrefix "builtin:" ($model.path | default "builtin:arithmetic") | ternary "builtin" "none" }}]
  env:
    {{- include "asyncrl.env" . | nindent 4 }}
  resources:
    {{- toYaml .resources | nindent 4 }}
  securityContext:
    {{- include "asyncrl.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: cache
      mountPath: /pod/cache
    - name: tmp
      mountPath: /tmp
    - name: config
      mountPath: /etc/asyncrl
      readOnly: true
{{- with .root.Values.modelCommand }}
- name: model
  image: {{ include "asyncrl.image" $.root }}
  imagePullPolicy: {{ $.root.Values.image.pullPolicy }}
  command:
    {{- toYaml . | nindent 4 }}
  env:
    {{- include "asyncrl.env" $ | nindent 4 }}
  resources:
    {{- toYaml $.resources | nindent 4 }}
  securityContext:
    {{- include "asyncrl.containerSecurity" $ | nindent 4 }}
  volumeMounts:
    {{- include "asyncrl.mounts" $ | nindent 4 }}
{{- end }}
{{- end }}
