{{- define "kdskills.image" -}}
{{ required "image.repository is required" .Values.image.repository }}@{{ required "image.digest is required: sha256:…" .Values.image.digest }}
{{- end }}

{{- define "kdskills.labels" -}}
app.kubernetes.io/name: kdskills
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kdskills.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false  # KDSKILLS_… variables of services would be taken for settings
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "kdskills.restricted" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10000
  runAsGroup: 10000
  fsGroup: 10000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kdskills.container" -}}
{{- $top := index . 0 -}}
image: {{ include "kdskills.image" $top }}
imagePullPolicy: {{ $top.Values.image.pullPolicy }}
{{- with merge (index . 1) $top.Values.variables }}
env:
  {{- range $name, $value := . }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
{{- end }}
{{- with $top.Values.storeSecret }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end }}

{{- define "kdskills.closed" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "kdskills.mounts" -}}
volumeMounts:
  - {name: settings, mountPath: /etc/kdskills, readOnly: true}
  - {name: state, mountPath: /home/kdskills}
  - {name: cache, mountPath: /var/cache/kdskills}
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "kdskills.volumes" -}}
- name: settings
  secret: {secretName: {{ required "settingsSecret is required" .Values.settingsSecret }}, defaultMode: 0440}
- name: cache
  emptyDir: {sizeLimit: 4Gi}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- end }}
