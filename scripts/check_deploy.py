"""Checks what is under deploy/ and docker-compose.yml against schemas, against the metrics that exist,
and against each other. `scripts/check-deploy.sh` sets up what it needs and runs it.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import promql_parser
import yaml

ROOT = Path(__file__).parent.parent
KUBERNETES = ROOT / "deploy/kubernetes"
LANES = ["high", "normal", "low"]
ROLES = ["ingest", "preprocess", "infer", "sink", "serve"]
# The scaler's page in KEDA's documentation (scalers/nats-jetstream), and the fields of a ScaledObject
# (reference/scaledobject-spec).
SCALER_NEEDS = {"natsServerMonitoringEndpoint", "account", "stream", "consumer", "lagThreshold"}
SCALER_TAKES = SCALER_NEEDS | {"activationLagThreshold", "useHttps"}
SCALED_OBJECT = {
    "scaleTargetRef", "pollingInterval", "cooldownPeriod", "initialCooldownPeriod", "idleReplicaCount",
    "minReplicaCount", "maxReplicaCount", "fallback", "advanced", "triggers",
}
problems = []


def need(holds, *what):
    if not holds:
        problems.append(" ".join(str(part) for part in what))


def documents(path):
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def seconds(duration):
    number, unit = re.fullmatch(r"(\d+)(s|m)", duration).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


def check_manifests():
    """Every manifest against the schema of its kind; every name that one file takes from another."""
    deployments = {}
    manifests = sorted((KUBERNETES / "base").glob("*.yaml"))
    for path in manifests:
        for found in documents(path):
            if found["kind"] == "Kustomization":
                continue
            try:
                kubernetes_validate.validate(found, "1.34", strict=True)
            except kubernetes_validate.ValidationError as error:
                need(False, path, error.message)
            if found["kind"] == "Deployment":
                deployments[found["metadata"]["name"]] = found
    need(len(deployments) == len(ROLES), "there are", len(deployments), "deployments, not one for each role")
    config = (KUBERNETES / "base/trommel.toml").read_text()
    drain = seconds(re.search(r'drain-timeout = "(\w+)"', config)[1])
    for name, found in deployments.items():
        pod = found["spec"]["template"]["spec"]
        need(drain < pod["terminationGracePeriodSeconds"], name, "is killed while it drains")
        labels = found["spec"]["template"]["metadata"]["labels"]
        need(found["spec"]["selector"]["matchLabels"].items() <= labels.items(), name, "selects no pod")
        container = pod["containers"][0]
        need(container["securityContext"]["readOnlyRootFilesystem"], name, "writes to its root")
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        check_user(name.removeprefix("trommel-"), variables)
        command(["trommel", *container["args"]], name)
    for path in sorted(KUBERNETES.glob("**/kustomization.yaml")):
        kustomization = documents(path)[0]
        for named in kustomization["resources"] + [
            patch["path"] for patch in kustomization.get("patches", []) if "path" in patch
        ]:
            need((path.parent / named).exists(), path, "names", named, "which is not there")
        for patch in kustomization.get("patches", []):
            if "path" in patch:
                check_patch(path.parent / patch["path"], deployments)
            else:
                names = re.compile(patch["target"]["name"])
                need(any(names.fullmatch(name) for name in deployments), path, "patches nothing")
    check_scaled_objects(deployments)


def check_patch(path, deployments):
    """A patch is a manifest once it is laid over what it changes."""

    def laid_over(base, patch):
        if isinstance(base, dict) and isinstance(patch, dict):
            return base | {key: laid_over(base.get(key), value) for key, value in patch.items()}
        if isinstance(base, list) and isinstance(patch, list) and patch and "name" in patch[0]:
            by_name = {item["name"]: item for item in base}
            for item in patch:
                by_name[item["name"]] = laid_over(by_name.get(item["name"]), item)
            return list(by_name.values())
        return patch

    for patch in documents(path):
        name = patch["metadata"]["name"]
        need(name in deployments, path, "patches", name, "which is not there")
        merged = laid_over(deployments.get(name), patch)
        try:
            kubernetes_validate.validate(merged, "1.34", strict=True)
        except kubernetes_validate.ValidationError as error:
            need(False, path, error.message)
        command(["trommel", *merged["spec"]["template"]["spec"]["containers"][0]["args"]], name)


def check_scaled_objects(deployments):
    path = KUBERNETES / "overlays/keda/scaled-objects.yaml"
    consumers = {"TROMMEL_TASKS": "preprocess", "TROMMEL_TENSORS": "infer-digits=40eab78fefd629"}
    for found in documents(path):
        spec, name = found["spec"], found["metadata"]["name"]
        need(found["apiVersion"] == "keda.sh/v1alpha1" and found["kind"] == "ScaledObject", path, name)
        need(spec.keys() <= SCALED_OBJECT, name, "has unknown fields", spec.keys() - SCALED_OBJECT)
        need(spec["scaleTargetRef"]["name"] in deployments, name, "scales nothing")
        lanes = set()
        for trigger in spec["triggers"]:
            need(trigger["type"] == "nats-jetstream", name, "has a trigger of another type")
            metadata = trigger["metadata"]
            need(SCALER_NEEDS <= metadata.keys() <= SCALER_TAKES, name, "has other fields than the scaler")
            need(all(isinstance(value, str) for value in metadata.values()), name, "has fields that are no text")
            need(metadata["account"] == "TROMMEL", name, "asks for another account than the broker's")
            prefix, lane = metadata["consumer"].rsplit("-", 1)
            need(consumers.get(metadata["stream"]) == prefix, name, "names no consumer of ours:", prefix)
            lanes.add(lane)
        need(lanes == set(LANES), name, "leaves out lanes")


def check_compose():
    compose = documents(ROOT / "docker-compose.yml")[0]
    services = compose["services"]
    for role in ROLES:
        service = services[role]
        check_user(role, service["environment"])
        need(service["read_only"], role, "writes to its root")
        command(["trommel", *service["command"]], role)
        need(seconds(service["stop_grace_period"]) > 25, role, "is killed while it drains")
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            there = (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"]
            need(there, name, "mounts", source, "which is not there")
    for path in sorted((ROOT / "deploy/compose").glob("**/*.y*ml")):
        need(documents(path), path, "is empty")
    targets = documents(ROOT / "deploy/compose/prometheus.yml")[0]["scrape_configs"][0]["dns_sd_configs"]
    need(set(targets[0]["names"]) <= services.keys(), "Prometheus asks services that are not there")


def check_user(role, variables):
    """A process connects as the user of its role, and reads answers in that user's inbox."""
    user = re.match(r"(?:nats|tls)://(\w+):", variables["TROMMEL_BROKER__URL"])
    need(user and user[1] == role, role, "connects as another user:", variables["TROMMEL_BROKER__URL"])
    need(variables["TROMMEL_BROKER__INBOX_PREFIX"] == f"_INBOX.{role}", role, "listens to another inbox")


def check_permissions():
    """The broker's users are those that the binary prints, and the compose file has all their passwords."""
    binary, path = ROOT / "target/debug/trommel", ROOT / "deploy/nats/permissions.conf"
    printed = subprocess.run([binary, "nats-permissions"], capture_output=True, text=True).stdout
    need(path.read_text() == printed, path, "is not what `trommel nats-permissions` prints")
    passwords = set(re.findall(r"password: \$(\w+)", printed))
    given = documents(ROOT / "docker-compose.yml")[0]["services"]["nats"]["environment"]
    need(passwords and passwords == given.keys(), "the broker's passwords are", passwords, "not", given.keys())


def command(words, whose):
    """The command line is one that the binary takes."""
    binary = ROOT / "target/debug/trommel"
    ended = subprocess.run([binary, *words[1:], "--help"], capture_output=True, text=True)
    need(ended.returncode == 0, whose, "runs", " ".join(words), ended.stderr)


def check_config():
    binary, path = ROOT / "target/debug/trommel", KUBERNETES / "base/trommel.toml"
    ended = subprocess.run([binary, "config", "--config", path], capture_output=True, text=True)
    need(ended.returncode == 0, path, ended.stderr)


def metrics_named(expression, where):
    """The metrics of a query. It has to be one."""
    expression = expression.replace("$__rate_interval", "5m").replace("$price_per_hour", "1")
    try:
        parsed = promql_parser.parse(expression)
    except ValueError as error:
        need(False, where, expression, error)
        return set()
    return set(re.findall(r"\btrommel_\w+", parsed.prettify()))


def check_queries():
    table = (ROOT / "docs/metrics.md").read_text()
    kinds = dict(re.findall(r"^\| `(trommel_\w+)` \| (\w+) \|", table, re.MULTILINE))
    known = {name for name, kind in kinds.items() if kind != "histogram"}
    for name, kind in kinds.items():
        if kind == "histogram":
            known |= {name + suffix for suffix in ("_bucket", "_sum", "_count")}
    used = set()
    for group in documents(ROOT / "deploy/prometheus/alerts.yml")[0]["groups"]:
        for rule in group["rules"]:
            used |= metrics_named(rule["expr"], rule["alert"])
            need({"summary", "action"} <= rule["annotations"].keys(), rule["alert"], "does not say what to do")
    dashboard = json.loads((ROOT / "deploy/grafana/trommel.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            used |= metrics_named(target["expr"], panel["title"])
    need(len(used) > 20, "only", len(used), "metrics are used")
    need(used <= known, "queries name metrics that are not there:", sorted(used - known))
    made = subprocess.run(
        [sys.executable, ROOT / "deploy/grafana/make_dashboard.py", "--print"], capture_output=True, text=True
    )
    need(json.loads(made.stdout) == dashboard, "trommel.json is not what make_dashboard.py makes")


check_manifests()
check_compose()
check_config()
check_permissions()
check_queries()
if problems:
    sys.exit("\n".join(["deploy/ has problems:", *problems]))
print("deploy/: manifests, compose file, alert rules and dashboard hold together")
