{{/* A ledger must not lose keys to eviction, and should survive a restart. */}}
{{- define "moorage.redisConf" -}}
port 6379
# The NetworkPolicy keeps others out.
protected-mode no
dir /data
appendonly yes
appendfsync everysec
save ""
maxmemory {{ .Values.redis.bundled.maxMemory }}
maxmemory-policy noeviction
{{- end -}}
