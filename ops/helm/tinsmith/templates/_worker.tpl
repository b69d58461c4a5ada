{{/* The pod template of a worker, or of the leader or a member of a trainer on several nodes. Give the root, the worker,
its labels and the part. */}}
{{- define "tinsmith.workerPod" -}}
{{- $root := .root }}
{{- $worker := .worker }}
{{- $values := $root.Values }}
{{- $member := eq .part "member" }}
{{- $grouped := ne .part "worker" }}
metadata:
  labels:
    {{- if $member }}
    {{- include "tinsmith.selector" (dict "root" $root "component" (printf "%s-member" $worker.component)) | nindent 4 }}
    {{- else }}
    {{- include "tinsmith.labels" .labels | nindent 4 }}
    {{- end }}
    tinsmith/workers: {{ $worker.component }}
  annotations:
    {{- include "tinsmith.checksum" $root | nindent 4 }}
spec:
  {{- include "tinsmith.pod" $root | nindent 2 }}
  # A worker puts its running calls back 7 s after SIGTERM, and ends within 27 s; ranks on other nodes have 45 s.
  terminationGracePeriodSeconds: {{ ternary 90 60 $grouped }}
  # The pause process reaps what ranks and engines leave, and a signal ends a worker that is still loading.
  shareProcessNamespace: true
  {{- if and $worker.gpus $values.gpu.runtimeClassName }}
  runtimeClassName: {{ $values.gpu.runtimeClassName }}
  {{- end }}
  {{- with $worker.values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $worker.values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $values.handover.hostPath (not $worker.trains) }}
  # New weights come through the memory of the trainers' node.
  affinity:
    podAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels:
                tinsmith/workers: {{ $worker.partner }}
  {{- end }}
  containers:
    - name: {{ ternary "member" "worker" $member }}
      image: {{ include "tinsmith.image" (dict "root" $root "name" "worker") }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- $command := printf "workers.%s" (ternary "trainer" "sampler" $worker.trains) }}
      {{- $arguments := list "--base" $worker.base "--name" (replace "_" "-" $worker.section) }}
      {{- if hasPrefix "full" $worker.section }}
      {{- $arguments = append $arguments "--full" }}
      {{- end }}
      {{- if $member }}
      # The ranks get settings and secrets over ssh.
      command: [/usr/sbin/sshd, -D, -e, -f, /etc/ssh-tinsmith/sshd_config]
      {{- else if $grouped }}
      # The first host is this pod, and each host is reached over ssh.
      command:
        - sh
        - -euc
        - |
          /usr/sbin/sshd -f /etc/ssh-tinsmith/sshd_config
          echo "$HOSTNAME.{{ include "tinsmith.name" .labels }} slots={{ $worker.gpus }}" > /tmp/hosts
          for member in {{ range $i := until (int $worker.nodes) }}{{ if $i }}{{ $i }} {{ end }}{{ end }}; do
            echo "$HOSTNAME-$member.{{ include "tinsmith.name" .labels }} slots={{ $worker.gpus }}" >> /tmp/hosts
          done
          exec python -m {{ $command }} "$@"
        - worker
      args: {{ toJson $arguments }}
      {{- else }}
      command: {{ concat (list "python" "-m" $command) $arguments | toJson }}
      {{- end }}
      {{- if not $member }}
      env:
        {{- include "tinsmith.env" $root | nindent 8 }}
        - {name: HF_HOME, value: /var/lib/tinsmith/huggingface}
        {{- include "tinsmith.variables" $worker.values.env | nindent 8 }}
      {{- end }}
      {{- if $member }}
      ports:
        - {name: ssh, containerPort: 2222}
      {{- include "tinsmith.workerProbes" (dict "check" "tcpSocket: {port: ssh}" "seconds" 60) | nindent 6 }}
      lifecycle:
        # sshd ends at once, and the ranks here with it. The leader stops at the same time, and ends them in order.
        preStop:
          exec:
            command: [sh, -c, "while grep -qs '[w]orkers[.]node' /proc/[0-9]*/cmdline; do sleep 1; done"]
      {{- else }}
      ports:
        - {name: metrics, containerPort: {{ $worker.port }}}
      # The metrics are there once the model is loaded. A thread of their own answers, also during a step.
      {{- include "tinsmith.workerProbes" (dict "check" "httpGet: {path: /metrics, port: metrics}" "seconds" $worker.startup) | nindent 6 }}
      {{- end }}
      resources:
        {{- $resources := deepCopy $worker.values.resources }}
        {{- if $worker.gpus }}
        {{- $_ := set $resources "limits" (merge (dict $values.gpu.resource $worker.gpus) (default dict $resources.limits)) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- include "tinsmith.containerSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "tinsmith.mounts" $root | nindent 8 }}
        # gloo and vLLM exchange tensors between processes there.
        - {name: shm, mountPath: /dev/shm}
        {{- if $values.handover.hostPath }}
        - {name: handover, mountPath: /handover}
        {{- end }}
        {{- if $grouped }}
        - {name: ssh-config, mountPath: /etc/ssh-tinsmith/sshd_config, subPath: sshd_config, readOnly: true}
        - {name: ssh-config, mountPath: /etc/ssh/ssh_config.d/tinsmith.conf, subPath: ssh_config, readOnly: true}
        - {name: ssh-keys, mountPath: /etc/ssh-tinsmith/keys, readOnly: true}
        {{- end }}
  volumes:
    {{- include "tinsmith.volumes" $root | nindent 4 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ default "1Gi" $worker.values.sharedMemory }}}
    {{- if $values.handover.hostPath }}
    - name: handover
      hostPath: {path: {{ $values.handover.hostPath }}, type: Directory}
    {{- end }}
    {{- if $values.data.claim }}
    - name: data
      persistentVolumeClaim: {claimName: {{ $values.data.claim }}}
    {{- else if not $values.data.storage }}
    - name: data
      emptyDir: {}
    {{- end }}
    {{- if $grouped }}
    - name: ssh-config
      configMap: {name: {{ include "tinsmith.name" (dict "root" $root "component" "ssh") }}}
    - name: ssh-keys
      secret: {secretName: {{ $values.ssh.secret }}, defaultMode: 0440}
    {{- end }}
{{- end }}

{{/* The probes of a worker: it may take `seconds` to start. */}}
{{- define "tinsmith.workerProbes" -}}
startupProbe:
  {{ .check }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ div .seconds 10 }}
readinessProbe:
  {{ .check }}
  periodSeconds: 10
  timeoutSeconds: 5
livenessProbe:
  {{ .check }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{/* The claim of a volume. Give its storage and storageClass. */}}
{{- define "tinsmith.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .storage }}}}
{{- end }}
