"""``python -m tests.cluster.autoscaled``: a run that outgrows its head, and Ray's autoscaler, which brings the nodes that it lacks.

The nodes are raylets of this machine (Ray's provider for tests); what asks for them, and when, is Ray's own. A head with one CPU,
up to two nodes of one more: the run asks for three actors, begins with one, and has to use both nodes as they come, and to end with
the bytes of one process. Needs ``pip install "ray[default]"``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import fedfleet
from tests.cluster import heads

ROUNDS, NODES = 600, 2
PATIENCE_S = 400.0
LISTS = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands", "rsync_filter"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude"),
)


def cluster(address: str) -> dict[str, object]:
    """Return the configuration of Ray's autoscaler."""
    return {
        "cluster_name": "raylets",
        "max_workers": NODES,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "more": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": NODES},
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 5,
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in LISTS},
    }


def main() -> int:
    """Run it; the exit status is 1 where a node is not used, or a byte is another."""
    if (why := heads.missing()) is not None:
        print(why)
        return 1
    port = heads.free()
    with tempfile.TemporaryDirectory() as folder:
        there, file = Path(folder, "there"), Path(folder, "cluster.json")
        file.write_text(json.dumps(cluster(f"127.0.0.1:{port}")))
        options = ("--num-cpus=1", f"--autoscaling-config={file}", "--include-dashboard=false")
        env = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        with heads.head(port, *options, env=env) as address:
            executor = json.dumps({"kind": "ray", "address": address, "actors": NODES + 1})
            with heads.running(there, f"rounds={ROUNDS}", f"executor={executor}") as process:
                status = process.wait(PATIENCE_S)
        config = heads.ROOT / "configs" / "cdma" / "digits.yaml"
        here = fedfleet.run(config, {"rounds": ROUNDS, "executor.kind": "local"}, out=Path(folder, "here"))
        events = [json.loads(line) for line in (there / "events.jsonl").read_text().splitlines()]
        joined = [event["round"] for event in events if event["event"] == "node_joined"]
        equal = [(run / "model.safetensors").read_bytes() for run in (there, here.folder)]
    verdict = "equal to" if equal[0] == equal[1] else "UNLIKE"
    print(f"exit {status}; nodes joined after rounds {joined} of {ROUNDS}; {verdict} one process")
    return int(status != 0 or len(joined) != NODES or equal[0] != equal[1])


if __name__ == "__main__":
    sys.exit(main())
