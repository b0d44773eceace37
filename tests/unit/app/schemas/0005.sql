BEGIN TRANSACTION;
CREATE TABLE kd_alembic (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT kd_alembic_pkc PRIMARY KEY (version_num)
);
INSERT INTO "kd_alembic" VALUES('service_0003');
INSERT INTO "kd_alembic" VALUES('work_0006');
CREATE TABLE kd_artifacts (
	id VARCHAR(80) NOT NULL, 
	tenant VARCHAR(200) NOT NULL, 
	project VARCHAR(200) NOT NULL, 
	agent VARCHAR(200) NOT NULL, 
	task_id VARCHAR(80), 
	job_id VARCHAR(80), 
	path TEXT NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	size BIGINT NOT NULL, 
	mime VARCHAR(255) NOT NULL, 
	mode INTEGER NOT NULL, 
	skill_name VARCHAR(500) NOT NULL, 
	version_hash VARCHAR(80) NOT NULL, 
	created_at BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE kd_audit (
	id INTEGER NOT NULL, 
	at BIGINT NOT NULL, 
	project VARCHAR(64) NOT NULL, 
	who VARCHAR(200) NOT NULL, 
	action VARCHAR(80) NOT NULL, 
	subject TEXT NOT NULL, 
	facts TEXT NOT NULL, 
	request_id VARCHAR(200) NOT NULL, token VARCHAR(32), agent VARCHAR(128) DEFAULT '' NOT NULL, address VARCHAR(64) DEFAULT '' NOT NULL, skill VARCHAR(256), 
	PRIMARY KEY (id)
);
INSERT INTO "kd_audit" VALUES(1,1795319436444027,'acme','ann','skill.upload','brief','{"active": "sha256:19d39e7f09bc04509174bbc9205571a7fcdc4760ba5820543e48544c23cd5adc", "before": null, "created": true, "version": "sha256:19d39e7f09bc04509174bbc9205571a7fcdc4760ba5820543e48544c23cd5adc"}','',NULL,'','','public.brief');
INSERT INTO "kd_audit" VALUES(2,1795319436513005,'acme','ann','token.create','891aadc36fd71aba','{"agent": "writer", "scopes": "skills:read work:read"}','',NULL,'','',NULL);
INSERT INTO "kd_audit" VALUES(3,1795319436544970,'acme','ann','skill.patch','brief','{"before": true, "enabled": false}','',NULL,'','','public.brief');
CREATE TABLE kd_hosts (
	host VARCHAR(80) NOT NULL, 
	drained_at BIGINT NOT NULL, 
	drained_by VARCHAR(400) NOT NULL, 
	PRIMARY KEY (host)
);
CREATE TABLE kd_jobs (
	id VARCHAR(80) NOT NULL, 
	tenant VARCHAR(200) NOT NULL, 
	project VARCHAR(200) NOT NULL, 
	agent VARCHAR(200) NOT NULL, 
	alias VARCHAR(200) NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	session_id VARCHAR(128), 
	session_key VARCHAR(80) NOT NULL, 
	body_hash VARCHAR(80) NOT NULL, 
	spec TEXT NOT NULL, 
	home VARCHAR(80), 
	host VARCHAR(80), 
	executor VARCHAR(80), 
	created_at BIGINT NOT NULL, 
	started_at BIGINT, 
	finished_at BIGINT, 
	error_code VARCHAR(80), 
	error_message TEXT, 
	cancel_at BIGINT, 
	cancel_reason TEXT, skill_name VARCHAR(500), repeat_of VARCHAR(80), traceparent VARCHAR(80), 
	PRIMARY KEY (id)
);
CREATE TABLE kd_meta (
	name VARCHAR(80) NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "kd_meta" VALUES('queue','3.4.0');
CREATE TABLE kd_project_skills (
	project VARCHAR(64) NOT NULL, 
	name VARCHAR(256) NOT NULL, 
	full_id VARCHAR(256) NOT NULL, 
	enabled BOOLEAN NOT NULL, 
	active VARCHAR(80), 
	created_at BIGINT NOT NULL, 
	changed_at BIGINT NOT NULL, 
	deleted_at BIGINT, 
	PRIMARY KEY (project, name)
);
INSERT INTO "kd_project_skills" VALUES('acme','brief','public.brief',0,'sha256:19d39e7f09bc04509174bbc9205571a7fcdc4760ba5820543e48544c23cd5adc',1795319436363929,1795319436538002,NULL);
CREATE TABLE kd_projects (
	project VARCHAR(64) NOT NULL, 
	bundle TEXT, 
	generation BIGINT NOT NULL, 
	created_at BIGINT NOT NULL, 
	PRIMARY KEY (project)
);
INSERT INTO "kd_projects" VALUES('acme',NULL,2,1795319436329845);
CREATE TABLE kd_skill_pins (
	project VARCHAR(64) NOT NULL, 
	holder VARCHAR(200) NOT NULL, 
	name VARCHAR(256) NOT NULL, 
	version VARCHAR(80) NOT NULL, 
	pinned_at BIGINT NOT NULL, 
	PRIMARY KEY (project, holder, name, version)
);
CREATE TABLE kd_skill_versions (
	project VARCHAR(64) NOT NULL, 
	name VARCHAR(256) NOT NULL, 
	version VARCHAR(80) NOT NULL, 
	full_id VARCHAR(256) NOT NULL, 
	description TEXT NOT NULL, 
	tree_digest VARCHAR(80) NOT NULL, 
	files TEXT NOT NULL, 
	diagnostics TEXT NOT NULL, 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(200) NOT NULL, 
	unused_since BIGINT, 
	PRIMARY KEY (project, name, version)
);
INSERT INTO "kd_skill_versions" VALUES('acme','brief','sha256:19d39e7f09bc04509174bbc9205571a7fcdc4760ba5820543e48544c23cd5adc','public.brief','Makes one page.','sha256:19d39e7f09bc04509174bbc9205571a7fcdc4760ba5820543e48544c23cd5adc','[["SKILL.md", 55, "e159a50667ff39a1cec585ed377187d40edeb93b27b1f6cf04bdba2d6046c8b5", false]]','[]',1795319435435226,'ann',NULL);
CREATE TABLE kd_tasks (
	id VARCHAR(80) NOT NULL, 
	tenant VARCHAR(200) NOT NULL, 
	project VARCHAR(200) NOT NULL, 
	agent VARCHAR(200) NOT NULL, 
	alias VARCHAR(200) NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	session_id VARCHAR(128), 
	session_key VARCHAR(80) NOT NULL, 
	body_hash VARCHAR(80) NOT NULL, 
	spec TEXT NOT NULL, 
	home VARCHAR(80), 
	host VARCHAR(80), 
	executor VARCHAR(80), 
	created_at BIGINT NOT NULL, 
	started_at BIGINT, 
	finished_at BIGINT, 
	error_code VARCHAR(80), 
	error_message TEXT, 
	cancel_at BIGINT, 
	cancel_reason TEXT, 
	mode VARCHAR(16) NOT NULL, 
	job_id VARCHAR(80), 
	step INTEGER, 
	try INTEGER, 
	attempt INTEGER NOT NULL, 
	restarts INTEGER NOT NULL, 
	ready_at BIGINT, 
	exit_code INTEGER, 
	signal INTEGER, 
	stdout_tail BLOB, 
	stderr_tail BLOB, 
	stdout_total BIGINT, 
	stderr_total BIGINT, 
	artifacts TEXT, 
	output_errors TEXT, 
	endpoints TEXT, skill_name VARCHAR(500), repeat_of VARCHAR(80), traceparent VARCHAR(80), 
	PRIMARY KEY (id)
);
INSERT INTO "kd_tasks" VALUES('task_5l2w3gqeb25gc4hjxeel3mrgwa','local','acme','writer','','queued','s1','21d0b714a62ec4100f2c473e142de524c3136727','','{"scope":{"tenant":"local","project":"acme","agent":"writer","alias":""},"session_id":"s1","command":{"argv":["true"],"cwd":".","env":{},"inputs":[],"outputs":[],"timeout_s":1.0},"placement":{"engine":"bubblewrap","skill_name":"public.brief","version_hash":"sha256:19d39e7f09bc04509174bbc9205571a7fcdc4760ba5820543e48544c23cd5adc","skills":[],"limits":{"wall_s":30.0,"cpu_s":null,"memory":268435456,"pids":64,"nofile":256,"fsize":67108864,"work_size":67108864,"tmp_size":67108864,"stdout":1048576,"stderr":1048576,"stdin":8388608,"arg_size":131072,"output_files":256,"output_size":67108864},"unsafe_local":false},"mode":"batch","on_busy":"wait","retry_on_lost":false,"service":null}','a5f1724d24acd535',NULL,NULL,1795319437648859,NULL,NULL,NULL,NULL,NULL,NULL,'batch',NULL,NULL,NULL,0,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'public.brief',NULL,NULL);
CREATE TABLE kd_tokens (
	id VARCHAR(32) NOT NULL, 
	secret_hash VARCHAR(80) NOT NULL, 
	label VARCHAR(200) NOT NULL, 
	project VARCHAR(64) NOT NULL, 
	agent VARCHAR(128) NOT NULL, 
	scopes TEXT NOT NULL, 
	allowed_tools TEXT, 
	requests_per_minute INTEGER, 
	concurrent_work INTEGER, 
	body_bytes BIGINT, 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(200) NOT NULL, 
	expires_at BIGINT, 
	revoked_at BIGINT, person BOOLEAN DEFAULT 0 NOT NULL, tools TEXT DEFAULT '[]' NOT NULL, last_used_at BIGINT, 
	PRIMARY KEY (id)
);
INSERT INTO "kd_tokens" VALUES('891aadc36fd71aba','3fed6eb10e2d6dc1c9d5cd5a400f80e01d5e2ae2316bfab12cbe1656700a1e5f','the first','acme','writer','["skills:read", "work:read"]',NULL,NULL,NULL,NULL,1795319436493358,'ann',NULL,NULL,0,'[]',NULL);
CREATE TABLE kd_usage (
	tenant VARCHAR(200) NOT NULL, 
	project VARCHAR(200) NOT NULL, 
	day INTEGER NOT NULL, 
	tasks BIGINT NOT NULL, 
	cpu_ms BIGINT NOT NULL, 
	PRIMARY KEY (tenant, project, day)
);
CREATE TABLE kd_work_sessions (
	session_key VARCHAR(80) NOT NULL, 
	host VARCHAR(80), 
	used_at BIGINT NOT NULL, 
	PRIMARY KEY (session_key)
);
CREATE TABLE kd_workers (
	executor VARCHAR(80) NOT NULL, 
	host VARCHAR(80) NOT NULL, 
	slot INTEGER NOT NULL, 
	pid INTEGER NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	state VARCHAR(8) NOT NULL, 
	started_at BIGINT NOT NULL, 
	beat_at BIGINT NOT NULL, 
	lease_until BIGINT, version VARCHAR(40), slots INTEGER, services INTEGER, address VARCHAR(300), stream_key VARCHAR(300), full_since BIGINT, 
	PRIMARY KEY (executor)
);
CREATE INDEX ix_kd_tokens_project ON kd_tokens (project);
CREATE INDEX ix_kd_artifacts_task_id ON kd_artifacts (task_id);
CREATE INDEX kd_artifacts_content ON kd_artifacts (project, sha256);
CREATE INDEX kd_jobs_held ON kd_jobs (executor, status);
CREATE INDEX kd_jobs_listed ON kd_jobs (tenant, project, created_at, id);
CREATE INDEX kd_jobs_status ON kd_jobs (status, finished_at);
CREATE INDEX ix_kd_tasks_job_id ON kd_tasks (job_id);
CREATE INDEX kd_tasks_held ON kd_tasks (executor, status);
CREATE INDEX kd_tasks_listed ON kd_tasks (tenant, project, created_at, id);
CREATE INDEX kd_tasks_status ON kd_tasks (status, finished_at);
CREATE INDEX ix_kd_workers_host ON kd_workers (host);
CREATE INDEX ix_kd_workers_state ON kd_workers (state);
CREATE INDEX kd_tasks_agent ON kd_tasks (tenant, project, agent, created_at, id);
CREATE INDEX kd_tasks_agent_status ON kd_tasks (tenant, project, agent, status, created_at, id);
CREATE INDEX kd_tasks_project_status ON kd_tasks (tenant, project, status, created_at, id);
CREATE INDEX kd_tasks_of_session ON kd_tasks (tenant, project, session_id, created_at, id);
CREATE INDEX kd_tasks_session ON kd_tasks (session_key, status, created_at, id);
CREATE INDEX kd_jobs_agent ON kd_jobs (tenant, project, agent, created_at, id);
CREATE INDEX kd_jobs_agent_status ON kd_jobs (tenant, project, agent, status, created_at, id);
CREATE INDEX kd_jobs_project_status ON kd_jobs (tenant, project, status, created_at, id);
CREATE INDEX kd_jobs_of_session ON kd_jobs (tenant, project, session_id, created_at, id);
CREATE INDEX kd_jobs_session ON kd_jobs (session_key, status, created_at, id);
CREATE INDEX kd_tasks_open ON kd_tasks (session_key, created_at) WHERE status IN ('queued', 'starting', 'running');
CREATE INDEX kd_tasks_turn ON kd_tasks (status, created_at, id) WHERE status IN ('queued', 'starting', 'running');
CREATE INDEX kd_jobs_open ON kd_jobs (session_key, created_at) WHERE status IN ('queued', 'starting', 'running');
CREATE INDEX kd_jobs_turn ON kd_jobs (status, created_at, id) WHERE status IN ('queued', 'starting', 'running');
CREATE INDEX kd_audit_listing ON kd_audit (project, id);
CREATE INDEX kd_tasks_of_skill ON kd_tasks (tenant, project, skill_name, created_at, id);
CREATE INDEX kd_jobs_of_skill ON kd_jobs (tenant, project, skill_name, created_at, id);
COMMIT;
