# What an E2B template needs for kdskills: Python 3.11 or newer as `python3`, the packages skills are read with, and root.
# kdskills itself is delivered into each sandbox, in the version of the host, so a template need not follow releases.
# Build with E2B's own tool, then set `e2b_template`.
FROM python:3.12-slim-bookworm

RUN apt-get update \
 && apt-get install -y --no-install-recommends bash coreutils jq \
 && rm -rf /var/lib/apt/lists/* \
 && pip install --no-cache-dir "pydantic>=2.9,<3" "PyYAML>=6.0.2" "Jinja2>=3.1.4" "PyStemmer>=2.2.0.1"
