#!/usr/bin/env bash
# Checks the Kubernetes manifests, the compose file, the alert rules, the dashboard, and that the page of all
# settings is what the code says. The binary has to be built.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$PWD/.tools/deploy-venv
packages=(kubernetes-validate==1.37.0 promql-parser==0.12.0 PyYAML==6.0.3)
if ! "$venv/bin/python" -c 'import kubernetes_validate, promql_parser, yaml' 2>/dev/null; then
    echo "check-deploy: fetching ${packages[*]}"
    python3 -m venv --clear "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}"
fi
"$venv/bin/python" scripts/check_deploy.py
python3 scripts/configuration.py --check
