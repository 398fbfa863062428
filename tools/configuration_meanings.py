"""What each setting means to the person who sets it. All else on the page is asked of the code."""

from __future__ import annotations

from msgspec import Struct

from papaya.config import (
    AsyncFL,
    Deployment,
    DeviceConfig,
    Evaluated,
    EvaluationPlan,
    OptimizerConfig,
    Requirements,
    SecureAggregation,
    ServerConfig,
    StopRule,
    SyncFL,
    TaskConfig,
)

# struct -> field -> what it means, for the person who sets it.
MEANINGS: dict[type[Struct], dict[str, str]] = {
    TaskConfig: {
        "task": "The name of the task, unique in the system.",
        "concurrency": "The paper's C: how many clients may take part at once.",
        "model_length": "How many float32 parameters the model has.",
        "regime": "AsyncFL or SyncFL. Switching is this one line.",
        "optimizer": "The server optimizer, which turns a full buffer into the next version.",
        "requirements": "What a device must declare to be compatible.",
        "secure_aggregation": "Updates are masked, and the server sees sums only: see [secure "
        "aggregation](secure-aggregation.md). Needs `clip`. None: updates are in the clear.",
        "training_timeout_s": "How long a client may take to download and to train.",
        "upload_timeout_s": "How long a client may take from reporting to its last chunk.",
        "max_examples": "The most examples that count for one client's weight.",
        "clip": "The largest L2 norm of an update. None sets no limit of the task's own.",
        "over_clip": "What the server does with an update above `clip`: refuse it or scale it.",
        "participation_gap_s": "A device takes part again only after this time; the device's own "
        "`participation_floor_s` can only lengthen it.",
        "max_participations": "How often one device may take part. None sets no limit.",
        "keep_versions": "How many of the newest versions are kept, at least.",
        "commit_interval_s": "An open buffer is made durable at most this often.",
        "durability": "`commit`: an acknowledged update survives a crash. `step`: only versions "
        "do, as in the paper.",
        "stop": "When the task ends by itself.",
        "evaluation": "Evaluates versions on devices' held-out data. None never does.",
        "evaluates": "Set in an evaluation task only: the version that it pins.",
    },
    StopRule: {
        "versions": "After this many versions, exactly.",
        "hours": "After this many hours since submission.",
        "target_loss": "When an evaluation's mean loss per example is at or below this.",
        "patience": "When so many evaluations in a row were no better than the best before.",
    },
    EvaluationPlan: {
        "every_versions": "One evaluation for every so many versions.",
        "clients": "How many devices an evaluation asks.",
        "timeout_s": "An evaluation that has not found its clients by then is given up.",
    },
    Evaluated: {
        "task": "The task whose version is evaluated.",
        "version": "The version.",
        "parameters": "The key of its parameters.",
        "model_length": "How many parameters it has.",
        "max_examples": "The most examples that one client may judge it by: the task's own.",
    },
    Deployment: {
        "data": "The folder of the state database, the blobs and the tokens.",
        "devices": "Where selectors listen for devices.",
        "admin": "Where the admin API, `/metrics` and `/health` are.",
        "servers": "Where this process listens for other servers, when roles run apart.",
        "coordinators": "The `servers` addresses of all coordinators, when roles run apart.",
        "device_tokens": "How devices are verified: `shared` (one token for all), `signed` (one "
        "token per device, made by `papaya token`), `none` (**insecure**), or "
        "`package.module:name` of a verifier of your own.",
        "tls_certificate": "A PEM file with the certificate chain; TLS is on when it is set.",
        "tls_key": "The PEM file with its key.",
        "tls_authority": "The PEM file of the authority that signed the other servers' "
        "certificates. None takes the system's.",
        "tsa": "Where the TSA of secure aggregation listens: `unix:/path` or "
        "`tcp:127.0.0.1:port`. Empty: a child of this process, with **insecure** software "
        "evidence, started when a task first asks for it.",
        "tsa_platform": "What vouches for it.",
        "tsa_collateral": "The JSON file of the vendor's collateral, kept fresh by you.",
        "tsa_leaf": "The record of its binary in the public log.",
        "log": "The folder of the public log, served at `/v1/log/`. None: `log` in the data "
        "folder, made when the child is started.",
        "fold_threads": "Worker threads of an aggregator, each with its own intermediate "
        "aggregate.",
        "upload_memory_mb": "Buffers for uploads on their way. An upload begins when there is room "
        "for all of it and two chunks more, so `upload_slots` x the largest model serves as many "
        "clients at once as there are slots; a model that does not fit at all is not served.",
        "max_connections": "Connections to one listener at a time; less where the system's limit "
        "on open files (`ulimit -n`) does not allow as many.",
        "max_connections_per_address": "Connections to the device listener from one client address "
        "at a time; IPv6 addresses count by their /64. Mobile carriers put many devices behind one "
        "address. Raise it if all devices come through a proxy that does not speak the PROXY "
        "protocol.",
        "proxies": "Addresses or networks of the load balancers in front of the device listener. "
        "They must send the PROXY protocol (version 1 or 2), which tells the client's address.",
        "drain_s": "How long a stopping server waits for uploads on their way.",
        "server": "The protocol's own settings, see below.",
    },
    AsyncFL: {
        "aggregation_goal": "The paper's K: updates per version. None takes 10 % of C.",
        "max_staleness": "Clients further behind are aborted. None takes the larger of 50 and "
        "16 × C ÷ K.",
    },
    SyncFL: {
        "over_selection": "The paper's o: K is C ÷ (1 + o), the other clients are spare.",
    },
    OptimizerConfig: {
        "kind": "`fedavg` and `fedsgd` are SGD on the server; the others are adaptive.",
        "rate": "The server's learning rate. None: 1 for SGD, 0.001 for `fedadam`, 0.01 for "
        "`fedyogi` and `fedadagrad`.",
        "momentum": "Momentum of `fedavg` and `fedsgd`.",
        "beta1": "Decay of the first moment.",
        "beta2": "Decay of the second moment of `fedadam` and `fedyogi`.",
        "epsilon": "Keeps the divisor from zero. None: 1e-8 for `fedadam`, 0.001 for the others.",
    },
    Requirements: {
        "engine": "The training engine that the device must have. None takes any.",
        "module": "Hash of the task's module, which the device must already have. None takes any.",
        "min_memory_mb": "The least memory that the device must declare.",
        "labels": "Labels that the device must carry, all of them.",
    },
    SecureAggregation: {
        "threshold": "The smallest number of clients whose sum may be revealed. None takes K.",
    },
    ServerConfig: {
        "heartbeat_s": "The one heartbeat: of aggregators, selectors, leader and clients.",
        "hold_s": "How long a selector holds a check-in before it rejects it.",
        "min_report_interval_s": "The shortest time between two reports of one server.",
        "held_report_interval_s": "A mere change in how many check-ins are held is reported at "
        "most this often.",
        "max_held": "How many check-ins one selector holds.",
        "upload_slots": "How many uploads one aggregator receives at once. Each takes the memory "
        "of a model.",
        "chunk_bytes": "The size of every chunk of an upload but the last.",
        "pace": "Check-ins that are asked for, per completion that is expected.",
        "min_retry_s": "The least mean time after which a rejected device is asked to come back.",
        "max_retry_s": "The longest mean time after which a rejected device is asked to come back.",
    },
    DeviceConfig: {
        "request_timeout_s": "A request without an answer is sent again after this time.",
        "check_in_timeout_s": "The same for a check-in, which a selector may hold: make it longer "
        "than the servers' `hold_s`.",
        "backoff_s": "The first back-off before a repeated request; it doubles, with jitter.",
        "max_backoff_s": "The longest back-off.",
        "give_up_s": "How long a device tries to check in, and then to join, before it gives up.",
        "participation_floor_s": "The device's own shortest time between two participations in "
        "one task. No task can shorten it.",
    },
}
