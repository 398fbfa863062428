{{- define "papaya.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Labels of the pods of one role: dict "root" $ "role" ROLE. */}}
{{- define "papaya.labels" -}}
app.kubernetes.io/name: papaya
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{/* The name at which other servers reach a pod of this role. */}}
{{- define "papaya.domain" -}}
{{ .root.Release.Name }}-{{ .role }}.{{ .root.Release.Namespace }}.svc
{{- end }}

{{- define "papaya.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "papaya.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{/*
A process that does not answer /live is restarted. A process that answers /health with 503 runs but
makes no progress, for example because the database is unavailable. It is taken out of service and
not restarted, because a restart would not help.
*/}}
{{- define "papaya.probes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne .Values.secrets.tls "") -}}
startupProbe:
  httpGet: { path: /live, port: admin, scheme: {{ $scheme }} }
  periodSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: { path: /live, port: admin, scheme: {{ $scheme }} }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: { path: /health, port: admin, scheme: {{ $scheme }} }
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}

{{- define "papaya.annotations" -}}
prometheus.io/scrape: "true"
prometheus.io/port: "8751"
prometheus.io/path: /metrics
prometheus.io/scheme: {{ ternary "https" "http" (ne .Values.secrets.tls "") }}
checksum/config: {{ include (print .Template.BasePath "/configmap.yaml") . | sha256sum }}
{{- end }}

{{/* Copies secrets where the server expects them, readable by its user only. */}}
{{- define "papaya.initContainers" -}}
{{- if .Values.secrets.tokens }}
initContainers:
  - name: tokens
    image: {{ include "papaya.image" . }}
    command: [sh, -c, "install -d -m 700 /var/lib/papaya/data && install -m 600 /tokens/* /var/lib/papaya/data/"]
    securityContext: {{- include "papaya.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - { name: data, mountPath: /var/lib/papaya }
      - { name: tokens, mountPath: /tokens, readOnly: true }
{{- end }}
{{- end }}

{{- define "papaya.mounts" -}}
- { name: config, mountPath: /etc/papaya, readOnly: true }
- { name: tmp, mountPath: /tmp }
- { name: data, mountPath: /var/lib/papaya }
{{- if .root.Values.secrets.tls }}
- { name: tls, mountPath: /etc/papaya-tls, readOnly: true }
{{- end }}
{{- if and .root.Values.secrets.roles (ne .role "single") }}
- { name: role, mountPath: /etc/papaya-role, readOnly: true }
{{- end }}
{{- end }}

{{- define "papaya.volumes" -}}
- name: config
  configMap: { name: {{ .root.Release.Name }}-config }
- name: tmp
  emptyDir: {}
{{- if .root.Values.secrets.tokens }}
- name: tokens
  secret: { secretName: {{ .root.Values.secrets.tokens }}, defaultMode: 0440 }
{{- end }}
{{- if .root.Values.secrets.tls }}
- name: tls
  secret: { secretName: {{ .root.Values.secrets.tls }}, defaultMode: 0440 }
{{- end }}
{{- if and .root.Values.secrets.roles (ne .role "single") }}
- name: role
  secret: { secretName: {{ .root.Values.secrets.roles }}-{{ .role }}, defaultMode: 0440 }
{{- end }}
{{- end }}
