"""The meaning of each setting, as it appears in docs/configuration.md."""

from __future__ import annotations

from msgspec import Struct

from papaya.config import (
    Aggregation,
    AsyncFL,
    Deployment,
    DeviceConfig,
    Evaluated,
    EvaluationPlan,
    EvaluationTerms,
    MetricBounds,
    MetricTarget,
    OptimizerConfig,
    Privacy,
    PrivateEvaluation,
    Requirements,
    SecureAggregation,
    ServerConfig,
    Staleness,
    StopRule,
    SyncFL,
    TaskConfig,
    Weighting,
)
from papaya.config.oidc import OidcConfig, OidcRole

# struct -> field -> meaning; the fields are in the order of the struct.
MEANINGS: dict[type[Struct], dict[str, str]] = {
    TaskConfig: {
        "task": "The name of the task, unique in the system.",
        "concurrency": "The paper's C: number of clients that may take part at the same time.",
        "model_length": "Number of float32 parameters of the model.",
        "regime": "AsyncFL or SyncFL.",
        "optimizer": "The server optimizer, which turns a full buffer into the next version.",
        "requirements": "What a device must declare to be compatible.",
        "secure_aggregation": "Mask updates, so that the server sees only sums: see [secure "
        "aggregation](secure-aggregation.md). Requires `clip`. None: updates are in the clear.",
        "training_timeout_s": "Time limit of a client for download and training together.",
        "upload_timeout_s": "Time limit of a client from its report to its last chunk.",
        "max_examples": "Maximum number of examples that counts for one client's weight.",
        "clip": "Maximum L2 norm of an update. None: only updates above 2⁶⁰ are refused.",
        "over_clip": "What to do with an update above `clip`: refuse it, or scale it down.",
        "participation_gap_s": "Minimum time between two participations of one device. The "
        "device's `participation_floor_s` can only increase it.",
        "max_participations": "Maximum number of participations of one device. None: no limit.",
        "keep_versions": "Minimum number of newest versions to keep.",
        "commit_interval_s": "Minimum time between two commits of an open buffer.",
        "durability": "`commit`: an acknowledged update survives a crash. `step`: only versions "
        "do, as in the paper.",
        "stop": "When the task ends automatically.",
        "evaluation": "Evaluate versions on devices' held-out data. None: no evaluations.",
        "evaluates": "Set only in an evaluation task: the version that it evaluates.",
        "metrics": "What evaluations measure besides the loss, at most 16.",
        "perplexity": "Show exp(loss) of evaluations: for language models.",
        "privacy": "Differential privacy: noise and its limits; see docs/privacy.md.",
        "staleness": "How stale updates are damped, see below. Signed; under secure aggregation "
        "devices apply it.",
        "weighting": "How much an update counts, see below. Signed; under secure aggregation "
        "devices apply it.",
        "aggregation": "How the updates of a version are combined, see below.",
    },
    Privacy: {
        "clip": "The largest norm of an update; also the `clip` of the task.",
        "max_participations": "How often a device takes part, over all runs and revisions.",
        "delta": "With at most this probability epsilon does not hold; from 1e-15 to 0.1.",
        "noise_multiplier": "Standard deviation of the noise, in clips; give this or `epsilon`.",
        "epsilon": "For all participations of one device in this task; determines the noise.",
        "weighting": "`equal`: all updates count the same. `capped`: by their examples.",
        "expected_weight": "Mean of min(examples, max_examples) / max_examples, if `capped`.",
        "evaluation": "Noise and limits of evaluations and histograms of norms. None: there are "
        "none.",
    },
    PrivateEvaluation: {
        "share": "Share of what a device can spend on the task; give this or `noise_multiplier`.",
        "noise_multiplier": "Standard deviation of the noise, in clips.",
        "max_participations": "How often a device takes part. None: as often as in training.",
        "max_loss": "Larger mean losses of a device count as this; the noise grows with it.",
        "max_examples": "A device with this many held-out examples or more has the full weight.",
    },
    EvaluationTerms: {
        "noise_multiplier": "Standard deviation of the noise, in clips.",
        "max_participations": "How often a device takes part.",
        "max_loss": "Larger mean losses of a device count as this.",
        "max_examples": "A device with this many held-out examples or more has the full weight.",
    },
    StopRule: {
        "versions": "End at exactly this version.",
        "hours": "End this many hours after submission.",
        "training_hours": "End this many hours after the first version.",
        "target_loss": "End when an evaluation's mean loss per example is at or below this.",
        "patience": "End after this many evaluations in a row without a better loss.",
        "target_metric": "End when the mean of a metric, or the perplexity, reaches this.",
    },
    MetricTarget: {
        "name": "A metric of the task, or `perplexity`.",
        "above": "Reached at or above this value.",
        "below": "Reached at or below this value.",
    },
    MetricBounds: {
        "name": "1 to 32 characters of a-z, 0-9 and `_`, starting with a letter.",
        "low": "The lower bound of a value. A batch whose mean is below it counts as this.",
        "high": "The upper bound of a value. A batch whose mean is above it counts as this.",
    },
    EvaluationPlan: {
        "every_versions": "Number of versions between two evaluations.",
        "clients": "Number of devices per evaluation.",
        "timeout_s": "An evaluation without enough clients is given up after this time.",
    },
    Evaluated: {
        "task": "The task whose version is evaluated.",
        "version": "The version that is evaluated.",
        "parameters": "The key of its parameters.",
        "model_length": "Number of parameters of that version.",
        "max_examples": "Maximum number of held-out examples of one client: the task's own.",
        "metrics": "The metrics of the task when the evaluation started.",
        "private": "Noise and bounds, if the task is private.",
        "norms": "Make a histogram of the norms of updates instead.",
    },
    Deployment: {
        "data": "Folder of the state database, the blobs and the tokens.",
        "state": "URL of the PostgreSQL database with the state: see [run on many "
        "machines](run-on-many-machines.md#state-on-postgresql). None: SQLite, in the data folder.",
        "blobs": "`s3://bucket/prefix`: keep blobs in [a bucket](run-on-many-machines.md"
        "#blobs-in-s3). Empty: in the folder `blobs` under `data`.",
        "blobs_endpoint": "URL of an S3-compatible store. Empty: `AWS_ENDPOINT_URL`, or Amazon's.",
        "blobs_region": "Region of the bucket. Empty: `AWS_REGION`, or `us-east-1`.",
        "blobs_credentials": "File with `aws_access_key_id`, `aws_secret_access_key` and "
        "optionally `aws_session_token`, one `name = value` per line, read again when it changes. "
        "None: the environment (`AWS_ACCESS_KEY_ID`, ...) or the machine's role.",
        "blobs_urls": "How devices download: `none` (from selectors), `signed` (from the bucket, "
        "with signed URLs), or the URL under which a CDN serves the folder `public` of the prefix.",
        "keep_deleted_s": "How long a bucket keeps deleted blobs, so that a backup of the state "
        "can still be restored. A folder keeps none.",
        "devices": "Address of the listener for devices, at a selector, and at an aggregator with "
        "`upload_url`.",
        "admin": "Address of the listener for the admin API, the dashboard, `/metrics`, `/health` "
        "and `/live`.",
        "servers": "Address of the listener for other servers, when roles run in separate "
        "processes.",
        "announce": "Address (host:port) at which other servers reach this one, if it is not the "
        "address on which it listens, for example a DNS name. None: the address of `servers`.",
        "upload_url": "URL, without a path, at which devices can reach the listener `devices` of "
        "this aggregator. Devices whose owners allow its host [upload "
        "there](run-on-many-machines.md#let-devices-upload-to-the-aggregators) instead of through "
        "a selector. Empty: always through selectors.",
        "coordinators": "The `servers` addresses of all coordinators, when roles run in separate "
        "processes.",
        "device_tokens": "How devices are verified: `shared` (one token for all), `signed` (one "
        "token per device, made by `papaya token`), `none` (**insecure**), or "
        "`package.module:name` of your own verifier.",
        "tls_certificate": "PEM file with the certificate chain. Setting it enables TLS.",
        "tls_key": "PEM file with the private key.",
        "tls_authority": "PEM file of the authority that signed the other servers' "
        "certificates. None: the system's authorities.",
        "servers_certificate": "PEM file with the certificate that this process shows to other "
        "servers. It names its roles (URI `papaya:aggregator`) and its host. Setting it enables "
        "TLS with certificates on both sides between roles.",
        "servers_key": "PEM file with the private key of `servers_certificate`.",
        "servers_authority": "PEM file of the authority that signs the certificates of all roles.",
        "servers_tls": "With `tls_certificate`: whether connections between roles use TLS as well. "
        "`false` is for a network that nobody else can read (**insecure** elsewhere), and must be "
        "the same in all processes.",
        "tsa": "Address of the TSA of secure aggregation, or a list of several: `unix:/path`, "
        "`tcp:127.0.0.1:port`, or `tls:host:port` of a gate on another machine. Empty: a child of "
        "this process, with **insecure** software evidence, started when a task first needs it.",
        "tsa_platform": "Platform that attests the TSA.",
        "tsa_collateral": "JSON file of the vendor's collateral. You have to keep it fresh.",
        "tsa_leaf": "Index of the TSA binary's record in the public log.",
        "log": "Folder of the public log, served at `/v1/log/`. None: `log` in the data "
        "folder, created when the child TSA is started.",
        "fold_threads": "Number of threads of an aggregator that add updates or apply steps at "
        "the same time, each with its own intermediate aggregate. None: one per core that the "
        "process may use, by its CPU affinity and the quota of its cgroup.",
        "upload_memory_mb": "Memory for uploads under way. An upload begins when there is room for "
        "all of it and two chunks more; slow uploads count only with what they hold. A task whose "
        "model does not fit at all is not served.",
        "max_connections": "Maximum number of connections to one listener. It is lowered if the "
        "system's limit on open files (`ulimit -n`) does not allow as many.",
        "max_connections_per_address": "Connections to the device listener from one client address "
        "at a time; IPv6 addresses count by their /64. Mobile carriers put many devices behind one "
        "address. Raise it if all devices come through a proxy that does not speak the PROXY "
        "protocol. None: 1,000, or a quarter of the connections to the listener if that is fewer. "
        "A number that you set is not lowered.",
        "proxies": "Addresses or networks that send the PROXY protocol (version 1 or 2) to the "
        "device listener: load balancers and, at an aggregator, selectors with `upload_routes`. It "
        "tells the client's address. Connections from there without it are closed.",
        "upload_routes": "At a selector: maps the host in each aggregator's `upload_url` to the "
        "address of that aggregator's listener `devices`. If a TLS connection asks for one of "
        "these hosts, the selector [passes it "
        "through](run-on-many-machines.md#let-selectors-pass-tls-through-to-aggregators) without "
        "decrypting it. `*` stands for one part of the name, the same on both sides. Needs "
        "`tls_certificate`. Other roles ignore it.",
        "drain_s": "How long a stopping aggregator waits for uploads under way.",
        "webhooks": "https URLs to which alerts and new versions are posted, see "
        "[webhooks](logs.md#webhooks).",
        "webhook_key": "File with the key that signs what is posted. Required with `webhooks`.",
        "log_format": "Format of the [log](logs.md) on stderr: `text`, or `json` with one object "
        "per line.",
        "log_level": "Events below this level are not logged.",
        "oidc": "An identity provider whose users may use the admin API, see below.",
        "extensions": "Entry points that tasks may name, as `group:name`, see "
        "[extensions](train-your-own-model.md#extensions-of-servers).",
        "server": "Settings of the protocol, see below.",
    },
    OidcConfig: {
        "issuer": "Its address, exactly as in the claim `iss`. https, except on this machine.",
        "audience": "What the claim `aud` must contain.",
        "roles": "What the values of the role claim allow; a user without a known value is "
        "refused.",
        "jwks": "Address of its public keys. Empty: as in its `/.well-known/openid-configuration`.",
        "name_claim": "Claim with the name of the user; the account is `oidc:NAME`.",
        "role_claim": "Claim with a text, or a list of texts, that `roles` maps to roles.",
        "algorithms": "Signature algorithms that are accepted.",
        "authority": "PEM file of the authority that signed the issuer's certificate; by default "
        "those of the system.",
    },
    OidcRole: {
        "role": "`viewer`, `owner` or `operator`.",
        "prefixes": "Of an owner: the beginnings of the names of its tasks.",
    },
    AsyncFL: {
        "aggregation_goal": "The paper's K: updates per version. None: 10 % of C, rounded to the "
        "nearest whole number (ties to even), at least 1.",
        "max_staleness": "Clients with a larger staleness are aborted. None: 16 × C ÷ K, rounded "
        "up, at least 50.",
    },
    SyncFL: {
        "over_selection": "The paper's o: K is C ÷ (1 + o), rounded to the nearest whole number; "
        "the other clients are spare.",
    },
    OptimizerConfig: {
        "kind": "`fedavg` and `fedsgd` are SGD on the server; `fedadam`, `fedyogi` and "
        "`fedadagrad` are adaptive. Any other name is that of an "
        "[extension](train-your-own-model.md#extensions-of-servers).",
        "rate": "Learning rate of the server. None: 1 for SGD and extensions, 0.001 for "
        "`fedadam`, 0.01 for `fedyogi` and `fedadagrad`.",
        "momentum": "Momentum of `fedavg` and `fedsgd`.",
        "beta1": "Decay of the first moment.",
        "beta2": "Decay of the second moment of `fedadam` and `fedyogi`.",
        "epsilon": "Added to the divisor. None: 1e-8 for `fedadam`, 0.001 for the others.",
        "averaged": "Number of values at the end of the model that are averaged instead of "
        "stepped: the statistics of BatchNorm. The task file determines it.",
        "parameters": "Pairs of a name and a number that an extension gets.",
    },
    Staleness: {
        "kind": "`polynomial`: (1 + s) to the power of −`exponent`, the paper's 1/√(1 + s) by "
        "default. `hinge`: 1 up to `grace`, then 1 ÷ (1 + `slope` × (s − `grace`)). `constant`: 1. "
        "Any other name is that of an [extension](train-your-own-model.md#extensions-of-servers).",
        "exponent": "Of `polynomial`.",
        "slope": "Of `hinge`.",
        "grace": "Of `hinge`: the staleness up to which an update is not damped.",
        "parameters": "Pairs of a name and a number that an extension gets.",
    },
    Weighting: {
        "kind": "`examples`: the examples of an update, at most `max_examples`. `equal`: 1. "
        "`capped`: its examples, at most `cap`; the client may train on more.",
        "cap": "Of `capped`.",
    },
    Aggregation: {
        "kind": "`mean`: the weighted mean. `median` and `trimmed_mean`: of each coordinate, all "
        "updates counting the same. `norm_bound`: the weighted mean of shortened updates. Any "
        "other name is that of an [extension](train-your-own-model.md#extensions-of-servers).",
        "trim": "Of `trimmed_mean`: the share of updates that is left out at each end.",
        "factor": "Of `norm_bound`: the largest norm, in median norms of the buffer.",
        "parameters": "Pairs of a name and a number that an extension gets.",
    },
    Requirements: {
        "engine": "Training engine that the device must have. None: any.",
        "module": "Name of the task file that the device must have: hash of the file, and of the "
        "model's frozen tensors if it has any. None: any.",
        "min_memory_mb": "Minimum memory that the device must declare, in MB.",
        "labels": "Labels that the device must declare.",
        "owner": "Set by `papaya task submit FILE`: the id of the owner who has signed the task.",
        "bundle": "The key of the blob with what the owner has signed.",
        "program": "The key of the blob with the program of the bundle.",
        "engine_version": "Minimum version of the engine. None: any. A signed task has the one in "
        "its manifest.",
        "manifest": "The digest of the signed manifest, in hex. The server sets it.",
        "frozen_file": "The key of the frozen tensors in the bundle. The server sets it.",
        "upload_bits": "Number of bits in which devices upload each number of an update: 32, or 16 "
        "or 8 with rounding at random; with secure aggregation 32 or 16. Only devices that can do "
        "this are eligible.",
    },
    SecureAggregation: {
        "threshold": "Minimum number of clients whose sum may be revealed. None: K.",
    },
    ServerConfig: {
        "heartbeat_s": "Heartbeat interval of aggregators, selectors, leader and clients.",
        "hold_s": "How long a selector holds a check-in before it rejects it.",
        "min_report_interval_s": "Minimum time between two reports of one server.",
        "held_report_interval_s": "Minimum time between two reports that only change the "
        "number of held check-ins.",
        "max_held": "Maximum number of check-ins that one selector holds.",
        "chunk_bytes": "Size of every chunk of an upload except the last.",
        "pace": "Check-ins that pace steering aims at, per expected completion.",
        "min_retry_s": "Minimum mean time after which a rejected device is asked to come back.",
        "max_retry_s": "Maximum mean time after which a rejected device is asked to come back.",
        "max_members_mb": "Maximum size of the single updates of one version, in MB, for rules "
        "that need them: K × model size.",
    },
    DeviceConfig: {
        "request_timeout_s": "A request without an answer is sent again this long after it was "
        "sent.",
        "check_in_timeout_s": "The same for a check-in, which a selector may hold. It must be "
        "longer than the servers' `hold_s`.",
        "backoff_s": "The n-th repetition of a request waits a random time of up to 2ⁿ times this "
        "value.",
        "max_backoff_s": "Upper limit of this waiting time.",
        "give_up_s": "How long a device tries to check in, and then to join.",
        "participation_floor_s": "Minimum time between two participations in one task, set by the "
        "device. No task can shorten it.",
    },
}

# Derived value -> meaning, where the first line of the docstring does not explain the value.
DERIVED: dict[str, str] = {
    "model_bytes": "Size of the parameters in bytes: 4 × `model_length`.",
    "workload": "Estimated load of the task: concurrency × model size in bytes. The Coordinator "
    "uses it to place tasks.",
}
