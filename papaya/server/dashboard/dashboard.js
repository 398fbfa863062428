// The dashboard: asks the admin API every two seconds and shows what it answers.
//
//   #/               the servers and all tasks
//   #/tasks/{task}   one task: progress, clients, what the server can see, actions
//
// The token stays in this variable: it is gone when the tab is reloaded or closed.

import { h, lineChart, short, table } from "./charts.js";

const POLL_MS = 2000;
const MOST_SAMPLES = 1800;  // an hour of live values
const MOST_CHANGES = 200;
const RECHECKED = 500;  // newest versions whose evaluation may still arrive

let token = "";
let account = null;  // who the server says this is: name, role, prefixes
let changed = 0;  // counts route changes, so that an answer to an old view is not shown
let timer = null;
let points = new Map();  // task → Map of version → point
let samples = new Map();  // task → live values since the page was opened
let changes = [];  // what changed since the page was opened, newest first
let before = null;  // the last status

const main = document.getElementById("main");
const byId = (id) => document.getElementById(id);

class Problem extends Error {}

async function ask(path, body) {
  const options = { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Problem("The server does not answer. Retrying every 2 seconds.");
  }
  const content = await answer.json().catch(() => ({}));
  if (answer.status === 401) {
    signOut("The server refused this token.");
    throw new Problem("The server refused this token.");
  }
  if (!answer.ok) throw new Problem([content.error ?? `status ${answer.status}`, content.hint].filter(Boolean).join(". "));
  return content;
}

// -- signing in -------------------------------------------------------------------------------

function signOut(why = "") {
  token = "";
  account = null;
  clearTimeout(timer);
  points = new Map(); samples = new Map(); changes = []; before = null;
  byId("sign-out").hidden = true;
  for (const id of ["leadership", "freshness", "account"]) byId(id).replaceChildren();
  const input = h("input", { id: "token", type: "password", autocomplete: "off", required: true });
  const form = h("form", {},
    h("h2", {}, "Sign in"),
    why && h("p", { class: "problem", role: "alert" }, why),
    h("label", { for: "token" }, "Token"),
    input,
    h("p", { class: "quiet" }, "The token of your account, or the content of admin.token in the server's data folder. It stays in this tab and is forgotten when you reload."),
    h("button", { type: "submit" }, "Sign in"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    token = input.value.trim();
    byId("sign-out").hidden = false;
    show();
  });
  main.replaceChildren(form);
  input.focus();
}

// -- polling ----------------------------------------------------------------------------------

function show() {
  if (token) {
    changed += 1;
    main.replaceChildren(h("p", { class: "quiet" }, "Loading…"));
    refresh();
  }
}

async function refresh() {
  clearTimeout(timer);
  const mine = changed;
  const task = location.hash.startsWith("#/tasks/") ? decodeURIComponent(location.hash.slice(8)) : null;
  try {
    const status = await ask("/admin/status");
    account ??= await ask("/admin/whoami");
    remember(status);
    const view = task === null ? fleet(status, await ask("/admin/events")) : await oneTask(task, status);
    if (mine !== changed || !token) return;
    showHeader(status);
    replaceView(view);
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    if (mine !== changed || !token) return;
    byId("freshness").replaceChildren();
    replaceView([h("p", { class: "problem", role: "alert" }, problem.message)]);
  }
  if (mine === changed && token) timer = setTimeout(whenVisible, POLL_MS);
}

function whenVisible() {
  if (document.hidden) document.addEventListener("visibilitychange", refresh, { once: true });
  else if (document.querySelector("dialog[open]")) timer = setTimeout(whenVisible, POLL_MS);
  else refresh();
}

// Keeps open details, the focused control and the scroll position of tables over a refresh.
function replaceView(view) {
  const regions = () => [...main.querySelectorAll("details, .scroll, button, a")];
  const old = regions();
  const open = old.map((element) => element.open === true), left = old.map((element) => element.scrollLeft);
  const focused = old.indexOf(document.activeElement);
  main.replaceChildren(...view);
  const fresh = regions();
  if (fresh.length !== old.length) return;
  fresh.forEach((element, index) => {
    if (open[index]) element.open = true;
    if (left[index]) element.scrollLeft = left[index];
  });
  if (focused >= 0) fresh[focused].focus({ preventScroll: true });
}

function showHeader(status) {
  const led = status.leads ? `this server leads (epoch ${status.epoch})`
    : status.is_led ? `led by ${status.leader} (epoch ${status.epoch})` : "✕ no coordinator leads";
  byId("leadership").replaceChildren(h("span", { class: status.is_led ? null : "bad" }, led));
  byId("account").replaceChildren(`${account.name}, ${account.role}`);
  byId("freshness").replaceChildren(`Updated ${clock(Date.now() / 1000)}`);
}

// -- what happened while the page was open ------------------------------------------------------

function remember(status) {
  const now = Date.now() / 1000;
  for (const task of status.tasks) {
    if (task.active === null) continue;
    const kept = samples.get(task.task) ?? [];
    kept.push({ at: now, active: task.active, demand: task.demand, held: task.held });
    if (kept.length > MOST_SAMPLES) kept.shift();
    samples.set(task.task, kept);
  }
  if (before) changes = [...differences(before, status).map((what) => ({ at: now, what })), ...changes].slice(0, MOST_CHANGES);
  before = status;
}

function differences(old, fresh) {
  const found = [];
  if (old.leader !== fresh.leader) found.push(`leader changed from ${old.leader || "nobody"} to ${fresh.leader || "nobody"}`);
  if (old.is_led !== fresh.is_led) found.push(fresh.is_led ? "a coordinator leads again" : "no coordinator leads");
  for (const [kind, name] of [["aggregators", "aggregator"], ["selectors", "selector"]]) {
    const was = new Set(old[kind].map((one) => one.node)), is = new Set(fresh[kind].map((one) => one.node));
    for (const node of is) if (!was.has(node)) found.push(`${name} ${node} started reporting`);
    for (const node of was) if (!is.has(node)) found.push(`${name} ${node} stopped reporting`);
  }
  const earlier = new Map(old.tasks.map((task) => [task.task, task]));
  for (const task of fresh.tasks) {
    const was = earlier.get(task.task), name = task.name || task.task;
    if (!was) found.push(`${name} was submitted`);
    else {
      if (was.state !== task.state) found.push(`${name} is ${task.state}${task.why ? `: ${task.why}` : ""}`);
      if (was.holder && task.holder && was.holder !== task.holder) found.push(`${name} moved from ${was.holder} to ${task.holder}`);
      if (was.halted !== task.halted) found.push(task.halted ? `${name} is halted: ${task.halted}` : `${name} makes versions again`);
    }
  }
  return found;
}

// -- the fleet ----------------------------------------------------------------------------------

function fleet(status, events) {
  const tasks = status.tasks.filter((task) => !task.evaluates);
  const evaluations = status.tasks.length - tasks.length;
  return [
    ...problems(status),
    h("h2", {}, "Tasks"),
    tasks.length ? table(`${count(tasks.length, "task")}, ${count(evaluations, "evaluation")}`, [
      { name: "Task" }, { name: "State" }, { name: "Regime" }, { name: "Version", number: true },
      { name: "Active of C", number: true }, { name: "Demand", number: true }, { name: "Waiting devices", number: true },
      { name: "Loss", number: true }, { name: "Aggregator" },
    ], newestFirst(tasks).map((task) => [
      h("a", { href: `#/tasks/${encodeURIComponent(task.task)}` }, task.name || task.task),
      state(task), task.regime, short(task.version),
      task.active === null ? "–" : `${short(task.active)} of ${short(task.concurrency)}`,
      short(task.demand), short(task.held), short(task.loss), task.holder || "–",
    ])) : h("p", { class: "quiet" }, "No tasks. Submit one with: papaya task submit FILE"),
    h("h2", {}, "Servers"),
    table(`Reports of ${count(status.aggregators.length, "aggregator")} and ${count(status.selectors.length, "selector")}`, [
      { name: "Server" }, { name: "Role" }, { name: "Last report", number: true }, { name: "Load" },
    ], [
      ...status.aggregators.map((one) => [one.node, "aggregator", ago(one.heard_s_ago), `${count(one.tasks, "task")}${one.is_overloaded ? ", ▲ overloaded" : ""}`]),
      ...status.selectors.map((one) => [one.node, "selector", ago(one.heard_s_ago), `${count(one.held, "device")} waiting, ${short(one.check_ins_per_s)} check-ins per second`]),
    ]),
    ...timeLine(events),
    ...history(),
  ];
}

// Placements, failovers and trouble, as the servers told them. The newest come first.
function timeLine(events) {
  return [
    h("h2", {}, "Timeline"),
    events.length ? table("Placements, failovers and problems at all servers, newest first; up to two seconds late", [{ name: "Time" }, { name: "Event" }, { name: "Details" }],
      events.slice(-MOST_CHANGES).reverse().map((one) => [date(one.at), `${{ warning: "▲ ", error: "✕ " }[one.level] ?? ""}${one.event.replaceAll("_", " ")}`, details(one)]))
      : h("p", { class: "quiet" }, "There are no placements, failovers or problems yet."),
  ];
}

function details(one) {
  const parts = Object.entries(one.fields).map(([name, value]) => `${name} ${Array.isArray(value) ? value.join(", ") : value}`);
  return [...(one.node ? [one.node] : []), ...parts].join(", ");
}

function newestFirst(tasks) {
  const rank = { running: 0, paused: 1 };
  return [...tasks].sort((a, b) => (rank[a.state] ?? 2) - (rank[b.state] ?? 2) || b.submitted - a.submitted);
}

function problems(status) {
  const found = status.clocks.map((one) => `The clock of ${one.node} is ${short(Math.abs(one.ahead_s))} s ${one.ahead_s > 0 ? "ahead of" : "behind"} the leader's.`);
  if (!status.is_led) found.unshift("No coordinator leads: no device is assigned until one does.");
  else if (!status.leads) found.unshift(`This server does not lead, so live numbers are missing. Open the dashboard of ${status.leader}.`);
  if (status.recovers) found.push("The coordinator is new: it waits for the aggregator of some task to report.");
  for (const task of status.tasks) if (task.halted) found.push(`${task.name || task.task} is halted: ${task.halted}`);
  for (const task of status.tasks) if (task.silent_s) found.push(`${task.holder}, which holds ${task.name || task.task}, has not reported for ${short(Math.round(task.silent_s))} s: its live numbers are old.`);
  return found.map((text) => h("p", { class: "problem" }, text));
}

function history() {
  return [
    h("h2", {}, "Changes"),
    changes.length ? table("Since this page was opened, newest first", [{ name: "Time" }, { name: "Change" }], changes.map((one) => [clock(one.at), one.what]))
      : h("p", { class: "quiet" }, "No leader, server or task changed since this page was opened."),
  ];
}

// -- one task -----------------------------------------------------------------------------------

async function oneTask(id, status) {
  const path = `/admin/tasks/${encodeURIComponent(id)}`;
  const detail = await ask(path);
  const task = detail.task, config = detail.config;
  const all = await pointsOf(task, path);
  const evaluated = all.filter((point) => point.loss !== null);
  const live = samples.get(task.task) ?? [];
  const since = live.length ? live[0].at : 0;
  const values = (field) => live.map((sample) => ({ x: (sample.at - since) / 60, y: sample[field] }));
  const metrics = (config.metrics ?? []).map((metric) => metric.name);
  const byVersion = (list, field) => list.map((point) => ({ x: point.version, y: point[field] }));
  return [
    h("h2", {}, task.name || task.task),
    ...detail.warnings.map((text) => h("p", { class: "problem" }, text)),
    task.halted ? h("p", { class: "problem" }, `Halted: ${task.halted}`) : null,
    facts([
      ["State", state(task)], ["Regime", `${task.regime}, K = ${short(task.aggregation_goal)}, C = ${short(task.concurrency)}`],
      ["Version", `${short(task.version)} (${short(detail.versions_per_minute)} per minute)`],
      ["Active clients", task.active === null ? "–" : `${short(task.active)} of ${short(task.concurrency)} (${Math.round(100 * task.utilization)} %)`],
      ["Client demand", short(task.demand)], ["Waiting devices", short(task.held)],
      ["Aggregator", task.holder || "–"], ["Submitted", date(task.submitted)],
      ...(task.name && task.name !== task.task ? [["Run", task.task]] : []),
    ]),
    actions(task, path),
    h("h2", {}, "What the server can see"),
    h("p", {}, sees(task, config)),
    config.secure_aggregation ? evidence(status.evidence) : null,
    privacy(config),
    rollout(detail.rollout),
    participation(detail, status),
    failures(detail.endings),
    h("div", { class: "panels" },
      lineChart({ title: "Loss", xName: "version", yName: "loss", points: byVersion(evaluated, "loss"), empty: "No version has been evaluated yet." }),
      ...metrics.map((name) => lineChart({ title: name, xName: "version", yName: name, points: evaluated.filter((p) => name in (p.metrics ?? {})).map((p) => ({ x: p.version, y: p.metrics[name] })), empty: "No version has been evaluated yet." })),
      lineChart({ title: "Staleness", xName: "version", yName: "mean versions behind", fromZero: true, points: byVersion(all.filter((p) => p.version > 0), "staleness"), empty: "No version yet." }),
      lineChart({ title: "Active clients", xName: "minutes since this page was opened", yName: "clients", wholeX: false, fromZero: true, limit: { value: task.concurrency, label: `C = ${short(task.concurrency)}` }, points: values("active"), empty: "Live numbers are known to the leading coordinator only, while the task runs." }),
      lineChart({ title: "Client demand", xName: "minutes since this page was opened", yName: "clients", wholeX: false, fromZero: true, points: values("demand"), empty: "Live numbers are known to the leading coordinator only, while the task runs." }),
      lineChart({ title: "Waiting devices", xName: "minutes since this page was opened", yName: "devices", wholeX: false, fromZero: true, points: values("held"), empty: "Live numbers are known to the leading coordinator only, while the task runs." }),
      lineChart({ title: "Examples per version", xName: "version", yName: "examples", fromZero: true, points: byVersion(all.filter((p) => p.version > 0), "examples"), empty: "No version yet." }),
      byVolume(evaluated, metrics)),
    h("h2", {}, "Versions"),
    table("The newest 20 versions", [
      { name: "Version", number: true }, { name: "Made" }, { name: "Updates", number: true }, { name: "Examples", number: true }, { name: "Staleness", number: true }, { name: "Loss", number: true }, ...metrics.map((name) => ({ name, number: true })),
    ], all.slice(-20).reverse().map((p) => [short(p.version), date(p.created), short(p.members), short(p.examples), short(p.staleness), noised(p, "loss", p.loss), ...metrics.map((name) => noised(p, name, p.metrics?.[name]))])),
    ...history(),
  ].filter(Boolean);
}

// A value of an evaluation, with the standard deviation of its noise if it has any.
function noised(point, name, value) {
  const deviation = point.deviations?.[name];
  return deviation === undefined ? short(value) : `${short(value)} ± ${short(deviation)}`;
}

function sees(task, config) {
  if (!config.secure_aggregation) return "Every client's update, in the clear. Whoever runs an aggregator can read each of them.";
  const least = short(config.secure_aggregation.threshold ?? task.aggregation_goal);
  return `Only sums of at least ${least} updates, if the TSA's evidence comes from hardware. Run papaya audit to check the evidence and the log.`;
}

// What devices base their trust in the TSA on, as this server is configured.
function evidence(found) {
  if (!found) return h("p", { class: "quiet" }, "This server has no TSA. Open the dashboard of a server that has one.");
  const platform = found.platform === "software" ? "software: INSECURE, it proves nothing" : found.platform.toUpperCase();
  const log = found.origin ? `${found.origin}, ${short(found.size)} records, root ${found.root.slice(0, 16)}…` : "not on this server";
  return facts([["Evidence of the TSA", platform], ["Checkpoint of the public log", log]]);
}

function rollout(found) {
  if (!found) return null;
  const share = `${short(100 * found.share)} % of the devices`;
  const words = { running: `is given to ${share}`, finished: "is given to all devices", rolled_back: "✕ was rolled back", ended: "was being rolled out when the task ended" }[found.state];
  const plan = found.plan, counts = found.counts, last = found.values.at(-1);
  const failing = (failed, counted) => failed + counted ? `${(100 * failed / (failed + counted)).toFixed(1)} % of ${short(failed + counted)}` : "–";
  return h("section", {}, h("h3", {}, "Rollout"), facts([
    ["Revision", `${found.revision} ${words}`],
    ...(found.why ? [["Because", found.why]] : []),
    ["Before", `${plan.metric} ${short(found.baseline)} at version ${short(found.baseline_version)}`],
    ...(found.state !== "running" ? [] : [
      ["Now", last ? `${plan.metric} ${short(last[1])} at version ${short(last[0])}` : "not evaluated yet"],
      ["Updates", `${short(counts.counted)} of ${short(plan.updates)}`],
      ["Failing", failing(counts.failed, counts.counted) + (found.share < 1 ? `, others ${failing(counts.others_failed, counts.others_counted)}` : "")],
      ["Evaluations after that", `${found.good} of ${plan.evaluations}`],
      ["Since", date(found.since)],
    ]),
  ]));
}

function privacy(config) {
  if (!config.privacy) return null;
  const { evaluation, ...own } = config.privacy;
  const named = [...Object.entries(own), ...Object.entries(evaluation ?? {}).map(([name, value]) => [`evaluation ${name}`, value])];
  const terms = named.filter(([, value]) => value !== null).map(([name, value]) => `${name} ${value}`);
  return h("p", {}, `Differential privacy: ${config.secure_aggregation ? "the TSA" : "the aggregator"} adds noise to each sum (${terms.join(", ")}). Each device keeps its own budget, which the server cannot see.`);
}

// The steps of one participation (docs/ARCHITECTURE.md), with the numbers of this task.
function participation(detail, status) {
  const { task, config, endings } = detail;
  const rate = status.selectors.reduce((sum, one) => sum + (one.check_ins_per_s ?? 0), 0);
  const counted = endings.counted ?? 0, ended = Object.values(endings).reduce((sum, times) => sum + times, 0);
  const steps = [
    ["Check-in", `${short(rate)} per second at all selectors; ${short(task.held)} eligible devices wait.`],
    ["Assignment", `The coordinator draws a task for each of them; this one wants ${short(task.demand)} more (weight ${short(task.weight)}, priority ${task.priority}).`],
    ["Join", `${task.holder || "An aggregator"} gives out at most C = ${short(task.concurrency)} slots; ${short(task.active)} are taken.`],
    ["Download and train", `Version ${short(task.version)}, at most ${short(config.max_examples)} examples, within ${short(config.training_timeout_s)} s.`],
    ["Report", "The aggregator fixes the staleness of the update and gives an upload ticket."],
    ["Upload", `${config.secure_aggregation ? "Masked on the device; " : ""}${short(4 * config.model_length)} bytes within ${short(config.upload_timeout_s)} s.`],
    ["Counted", `${short(counted)} of ${short(ended)} participations so far; ${short(detail.open_updates)} updates are in open buffers.`],
    ["Version", `Every K = ${short(task.aggregation_goal)} updates make a version: ${short(detail.versions_per_minute)} per minute now.`],
  ];
  return h("details", { class: "steps" }, h("summary", {}, "One participation, step by step"),
    h("ol", {}, steps.map(([name, text]) => h("li", {}, h("strong", {}, name), `: ${text}`))));
}

function failures(endings) {
  const rows = Object.entries(endings).sort((a, b) => b[1] - a[1]);
  const all = rows.reduce((sum, [, times]) => sum + times, 0);
  return h("section", {}, h("h3", {}, "How participations ended"), all
    ? table(`${short(all)} participations`, [{ name: "Ending" }, { name: "Times", number: true }, { name: "Share", number: true }],
      rows.map(([ending, times]) => [ending.replaceAll("_", " "), short(times), `${(100 * times / all).toFixed(1)} %`]))
    : h("p", { class: "quiet" }, "No participation has ended yet."));
}

// Asks for new points only. An evaluation may still add a loss to one of the newest.
async function pointsOf(task, path) {
  const known = points.get(task.task) ?? new Map();
  points.set(task.task, known);
  const newest = [...known.keys()].at(-1) ?? -1;
  const after = Math.max(-1, newest - RECHECKED);
  for (const point of await ask(`${path}/points${after >= 0 ? `?after=${after}` : ""}`)) known.set(point.version, point);
  return [...known.values()].sort((a, b) => a.version - b.version);
}

// The newest evaluation by data volume (paper, Table 1): all clients, then those with the most data.
function byVolume(evaluated, metrics) {
  const last = evaluated.findLast((point) => point.evaluated);
  const groups = last ? JSON.parse(last.evaluated) : {};
  const names = { all: "all", p75: "75th percentile and above", p99: "99th percentile and above" };
  const rows = Object.entries(names).filter(([key]) => groups[key]).map(([key, name]) => [name, short(groups[key].clients), short(groups[key].examples), short(groups[key].loss), ...metrics.map((metric) => short(groups[key].metrics?.[metric]))]);
  return h("section", { class: "panel" }, h("h3", {}, "Results by data volume"), rows.length
    ? table(`Version ${last.version}`, [{ name: "Clients by examples" }, { name: "Clients", number: true }, { name: "Examples", number: true }, { name: "Loss", number: true }, ...metrics.map((name) => ({ name, number: true }))], rows)
    : h("p", { class: "quiet" }, "No version has been evaluated yet."));
}

function facts(entries) {
  return h("dl", {}, entries.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function state(task) {
  const sign = { running: "●", paused: "‖", completed: "✓", cancelled: "✕" }[task.state] ?? "";
  const halted = task.halted ? ", halted" : "";
  return h("span", { class: task.halted || task.state === "cancelled" ? "bad" : "good", title: task.why || null }, `${sign} ${task.state}${halted}${task.why ? `: ${task.why}` : ""}`);
}

// -- actions ------------------------------------------------------------------------------------

function owns(task) {
  return account.role === "operator" || (account.role === "owner" && account.prefixes.some((prefix) => (task.name || task.task).startsWith(prefix)));
}

function actions(task, path) {
  if (!owns(task)) return h("p", { class: "quiet" }, `You are ${account.name}, ${account.role}: you cannot change this task.`);
  const button = (label, action) => h("button", { type: "button", onclick: () => confirmAction(task, path, label, action) }, label);
  const offered = { running: [["Pause", "pause"], ["Roll back", "rollback"], ["Cancel", "cancel"]], paused: [["Resume", "resume"], ["Roll back", "rollback"], ["Cancel", "cancel"]] }[task.state] ?? [];
  return offered.length ? h("div", { class: "actions" }, offered.map(([label, action]) => button(label, action))) : null;
}

const CONSEQUENCES = {
  pause: "No further clients join. Clients that are training finish, and their updates count.",
  resume: "Clients join again.",
  cancel: "The task ends and cannot be resumed. Clients that are training are told to stop.",
  rollback: "Makes a new version from the parameters of an earlier one. Updates trained on later versions are discarded.",
};

function confirmAction(task, path, label, action) {
  const version = action === "rollback" ? h("input", { id: "version", inputmode: "numeric", pattern: "[0-9]+", required: true }) : null;
  const reason = h("input", { id: "reason", maxlength: 500 });
  const failed = h("p", { class: "problem", role: "alert", hidden: true });
  const dialog = h("dialog", { "aria-labelledby": "action" }, h("form", {},
    h("h2", { id: "action" }, `${label}: ${task.name || task.task}`),
    h("p", {}, CONSEQUENCES[action]),
    version && h("label", { for: "version" }, "To version"), version,
    h("label", { for: "reason" }, "Reason (kept in the audit trail)"), reason, failed,
    h("div", { class: "actions" }, h("button", { type: "submit" }, label), h("button", { type: "button", onclick: () => dialog.close() }, "Close"))));
  dialog.querySelector("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await ask(`${path}/${action}`, { why: reason.value, ...(version ? { version: Number(version.value) } : {}) });
      dialog.close();
      refresh();
    } catch (problem) {
      failed.hidden = false;
      failed.replaceChildren(problem.message);
    }
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

// -- words --------------------------------------------------------------------------------------

function ago(seconds) {
  return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s ago`;
}

function count(number, name) {
  return `${short(number)} ${name}${number === 1 ? "" : "s"}`;
}

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

function date(seconds) {
  return seconds ? new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC" : "–";
}

addEventListener("hashchange", () => { show(); main.focus(); });
byId("sign-out").addEventListener("click", () => signOut());
signOut();
