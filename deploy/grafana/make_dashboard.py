"""Writes trommel.json, the Grafana dashboard, from the panels below.

    python3 deploy/grafana/make_dashboard.py
"""

import json
import sys
from pathlib import Path

RANGE = "$__rate_interval"


def rate(metric, by=None):
    of = f"sum by ({by})" if by else "sum"
    return f"{of} (rate({metric}[{RANGE}]))"


def quantile(share, metric, by=None):
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket[{RANGE}])))"


def busy(metric, stage):
    return f'{rate(metric)} / sum(trommel_threads{{stage="{stage}"}})'


# Each row: its title, and its panels as (title, kind, unit, width, [(query, legend)], description).
ROWS = [
    (
        "At a glance",
        [
            ("Images a second", "stat", "cps", 4, [(rate("trommel_committed_rows_total"), "")],
             "Rows made durable."),
            ("Bottleneck", "bargauge", "percentunit", 8,
             [
                 (busy("trommel_decode_seconds_sum", "preprocess") + " + " +
                  busy("trommel_resize_seconds_sum", "preprocess"), "preprocess is busy"),
                 (busy("trommel_infer_seconds_sum", "infer"), "infer is busy"),
                 (rate("trommel_commit_seconds_sum") + ' / count(trommel_in_flight{stage="sink"})',
                  "sink is busy"),
             ],
             "The stage whose threads are busiest is the bottleneck: more of it makes the job faster."),
            ("Time left", "stat", "s", 4,
             [("(sum(trommel_listed_images_total) - sum(trommel_committed_rows_total)) / "
               + rate("trommel_committed_rows_total"), "")],
             "Of what is listed so far by the processes that are up."),
            ("Failed rows", "stat", "percentunit", 4,
             [(rate('trommel_rows_total{status="failed"}') + " / " + rate("trommel_rows_total"), "")],
             "Share of failed rows."),
            ("Cost of a million images", "stat", "currencyUSD", 4,
             [(f"$price_per_hour / 3600 / {rate('trommel_committed_rows_total')} * 1e6", "")],
             "From the price of all machines an hour, which is a variable of this dashboard."),
        ],
    ),
    (
        "Throughput",
        [
            ("Images a second by stage", "timeseries", "cps", 12,
             [
                 (rate("trommel_listed_images_total"), "listed"),
                 (rate("trommel_decode_seconds_count"), "prepared"),
                 (rate("trommel_batch_size_sum"), "classified"),
                 (rate("trommel_committed_rows_total"), "committed"),
             ],
             "Where two lines part, a queue fills or empties."),
            ("In flight", "timeseries", "short", 6, [("sum by (stage) (trommel_in_flight)", "{{stage}}")],
             "Deliveries that are being worked on."),
            ("Waiting for room", "timeseries", "percentunit", 6,
             [(rate("trommel_backpressure_seconds_sum", "stage"), "{{stage}}")],
             "Publishes, on average, that wait because the next queue is full: the stage after it is slower."),
        ],
    ),
    (
        "Model",
        [
            ("Fill of batches", "timeseries", "percentunit", 6,
             [(rate("trommel_batch_fill_sum", "model") + " / " + rate("trommel_batch_fill_count", "model"),
               "{{model}}")],
             "Images in a batch as a share of a full one."),
            ("A batch", "timeseries", "s", 6,
             [
                 (quantile(0.5, "trommel_infer_seconds", "model"), "p50 {{model}}"),
                 (quantile(0.95, "trommel_infer_seconds", "model"), "p95 {{model}}"),
                 (quantile(0.99, "trommel_infer_seconds", "model"), "p99 {{model}}"),
             ],
             "Running a batch, from normalisation to scores."),
            ("Gaps between batches", "timeseries", "percentunit", 6,
             [(rate("trommel_batch_gap_seconds_sum") + " / " + rate("trommel_infer_seconds_sum"), "of compute")],
             "Time between two batches although the next one was waiting."),
            ("GPU", "timeseries", "percentunit", 6,
             [("max by (device) (trommel_gpu_utilisation_ratio)", "{{device}}")],
             "Share of time in which a kernel ran; nothing without an NVIDIA GPU."),
        ],
    ),
    (
        "Latency, 95th percentile",
        [
            ("Work on an image", "timeseries", "s", 12,
             [
                 (quantile(0.95, "trommel_fetch_seconds"), "fetch"),
                 (quantile(0.95, "trommel_decode_seconds"), "decode"),
                 (quantile(0.95, "trommel_resize_seconds"), "resize"),
                 (quantile(0.95, "trommel_commit_seconds"), "commit of a part"),
             ],
             ""),
            ("Waiting in the queues", "timeseries", "s", 12,
             [(quantile(0.95, "trommel_queue_wait_seconds", "stage"), "{{stage}}")],
             "From the storing of a message to its first delivery."),
        ],
    ),
    (
        "Trouble",
        [
            ("Failures by kind", "timeseries", "cps", 8, [(rate("trommel_failures_total", "kind"), "{{kind}}")], ""),
            ("Repeats", "timeseries", "cps", 8,
             [(rate("trommel_redeliveries_total", "stage"), "redelivered to {{stage}}"),
              (rate('trommel_deliveries_total{disposition="retry"}', "stage"), "put off by {{stage}}")], ""),
            ("Dead letters", "timeseries", "cps", 8,
             [(rate('trommel_deliveries_total{disposition="dead_letter"}', "stage"), "{{stage}}")],
             "Images that no attempt could prepare or classify; each has its failed row."),
            ("Bytes fetched", "timeseries", "Bps", 8, [(rate("trommel_fetched_bytes_total"), "")], ""),
            ("Parts committed", "timeseries", "cps", 8, [(rate("trommel_parts_total"), "")], ""),
            ("Models loaded", "timeseries", "s", 8,
             [(quantile(0.95, "trommel_model_load_seconds", "model"), "{{model}}")], ""),
        ],
    ),
    (
        "Requests",
        [
            ("Requests a second", "timeseries", "reqps", 8,
             [(rate("trommel_request_seconds_count", "outcome"), "{{outcome}}")],
             "By outcome: shed ones found no room, expired ones were too late."),
            ("Time of an answer", "timeseries", "s", 8,
             [(quantile(share, "trommel_request_seconds", "entrance"), f"p{share * 100:.0f} {{{{entrance}}}}")
              for share in (0.5, 0.95, 0.99)],
             "From the head of a request to its answer."),
            ("Wait and work of an image, 95th percentile", "timeseries", "s", 8,
             [(quantile(0.95, "trommel_request_queue_seconds", "stage"), "wait {{stage}}"),
              (quantile(0.95, "trommel_request_service_seconds", "stage"), "work {{stage}}")],
             "Waiting for a thread or a batch, and being worked on."),
            ("Fill of batches of requests", "timeseries", "percentunit", 8,
             [(f"{rate('trommel_live_batch_fill_sum', 'model')} / {rate('trommel_live_batch_fill_count', 'model')}",
               "{{model}}")], "Images of requests in a batch, as a share of a full one."),
            ("Age of frames, 95th percentile", "timeseries", "s", 8,
             [(quantile(0.95, "trommel_live_frame_age_seconds", "outcome"), "{{outcome}}")],
             "From when a frame of a live source was taken to its result."),
            ("Frames without a result", "timeseries", "cps", 8,
             [(rate("trommel_live_frames_dropped_total", "reason"), "{{reason}}")],
             "By the reason why they were dropped."),
        ],
    ),
]


def panel(number, place, title, kind, unit, queries, description):
    data = {"type": "prometheus", "uid": "prometheus"}
    made = {
        "id": number,
        "type": kind,
        "title": title,
        "description": description,
        "datasource": data,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": data, "expr": query, "legendFormat": legend}
            for at, (query, legend) in enumerate(queries)
        ],
    }
    if kind == "bargauge":
        made["fieldConfig"]["defaults"]["max"] = 1
        made["options"] = {"orientation": "horizontal", "displayMode": "gradient"}
    return made


def main():
    panels, number, y = [], 1, 0
    for title, of_row in ROWS:
        panels.append({"id": number, "type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        number, y, x, height = number + 1, y + 1, 0, 4 if title == "At a glance" else 8
        for name, kind, unit, width, queries, description in of_row:
            if x + width > 24:
                x, y = 0, y + height
            place = {"x": x, "y": y, "w": width, "h": height}
            panels.append(panel(number, place, name, kind, unit, queries, description))
            number, x = number + 1, x + width
        y += height
    dashboard = {
        "uid": "trommel",
        "title": "Trommel",
        "tags": ["trommel"],
        "schemaVersion": 41,
        "timezone": "utc",
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{
            "name": "price_per_hour", "label": "Price of all machines, $ an hour", "type": "textbox",
            "query": "1", "current": {"text": "1", "value": "1"},
        }]},
        "panels": panels,
    }
    text = json.dumps(dashboard, indent=1) + "\n"
    if sys.argv[1:] == ["--print"]:
        print(text, end="")
    else:
        (Path(__file__).parent / "trommel.json").write_text(text)


if __name__ == "__main__":
    main()
