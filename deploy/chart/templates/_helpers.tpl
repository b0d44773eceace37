{{- define "kdskills.image" -}}
{{ required "image.repository is required" .Values.image.repository }}@{{ required "image.digest is required: sha256:…" .Values.image.digest }}
{{- end }}

{{- define "kdskills.labels" -}}
app.kubernetes.io/name: kdskills
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kdskills.pod" -}}
enableServiceLinks: false  # KDSKILLS_… variables of services would be taken for settings
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "kdskills.cluster" -}}
{{- with .Values.serviceAccount.name }}
serviceAccountName: {{ . }}
{{- end }}
automountServiceAccountToken: {{ .Values.serviceAccount.automount }}
{{- end }}

{{- define "kdskills.account" -}}
securityContext:
  {{- if .Values.landlock }}
  runAsUser: 0
  runAsGroup: 0
  {{- else }}
  runAsNonRoot: true
  runAsUser: 10000
  runAsGroup: 10000
  fsGroup: 10000
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kdskills.container" -}}
image: {{ include "kdskills.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if .Values.landlock }}
    add: [CHOWN, DAC_OVERRIDE, KILL, SETGID, SETPCAP, SETUID]
    {{- end }}
env:
  - {name: KDSKILLS_STATE_DIR, value: {{ include "kdskills.home" . }}/state}
  {{- range $name, $value := .Values.variables }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
{{- end }}

{{- define "kdskills.mounts" -}}
{{- with .Values.storeSecret }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
volumeMounts:
  - {name: settings, mountPath: /etc/kdskills, readOnly: true}
  - {name: state, mountPath: {{ include "kdskills.home" . }}}
  - {name: cache, mountPath: /var/cache}
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "kdskills.home" -}}
{{ ternary "/var/lib/kdskills" "/srv/kdskills" .Values.landlock }}
{{- end }}

{{- define "kdskills.volumes" -}}
- name: settings
  secret: {secretName: {{ required "settingsSecret is required" .Values.settingsSecret }}, defaultMode: 0440}
- name: cache
  emptyDir: {sizeLimit: 4Gi}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- end }}
