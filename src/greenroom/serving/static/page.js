"use strict";
// One page, no framework: asks for a picture or a video and shows where the weights are meanwhile.

const $ = (id) => document.getElementById(id);
const state = { video: false, controller: null, since: 0, history: [], events: [], videoId: null, busy: false };

function headers(extra = {}) {
  const key = $("key").value;
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

async function api(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers) });
  if (answer.ok) return answer;
  if (answer.status === 401) document.querySelector(".key").hidden = false;
  let message = `${answer.status} ${answer.statusText}`;
  try { message = (await answer.json()).error.message; } catch { /* no body of ours */ }
  throw new Error(message);
}

const bytes = (n) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (n >= 1000 && i < units.length - 1) { n /= 1000; i += 1; }
  return `${i ? n.toFixed(2) : n} ${units[i]}`;
};

// ---------------------------------------------------------------- asking

function words() {
  const body = {};
  for (const field of $("ask").elements) {
    if (!field.name || field.value === "") continue;
    if (field.name === "num_frames" && !state.video) continue;
    body[field.name] = field.type === "number" ? Number(field.value) : field.value;
  }
  return body;
}

function show(progress, phase) {
  $("progress").value = progress;
  $("phase").textContent = phase;
}

const told = { queued: "Waiting for the worker", encode: "Reading the prompt", denoise: "Drawing", decode: "Decoding" };

function follow(data) {
  const step = data.steps ? `, step ${data.step} of ${data.steps}` : "";
  show(data.progress, (told[data.phase] || data.phase) + step);
}

function caption(prompt, data) {
  const m = data.metrics;
  $("caption").textContent = `${prompt} · ${data.size} · seed ${data.seed} · ${m.total_s.toFixed(2)} s · ` +
    `${bytes(m.bytes_to_device)} moved to the device · peak ${bytes(m.peak_bytes)} · stalls ${m.stalls}`;
  $("result").hidden = false;
}

async function* serverEvents(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const line = text.slice(0, end).split("\n").find((l) => l.startsWith("data: "));
      text = text.slice(end + 2);
      if (line) yield JSON.parse(line.slice(6));
    }
  }
}

async function drawPicture(body, signal) {
  const answer = await api("/v1/images/generations", {
    method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...body, stream: true }),
  });
  for await (const data of serverEvents(answer)) {
    if (data.error) throw new Error(data.error.message);
    if (data.type.endsWith(".progress")) follow(data);
    if (data.type.endsWith(".completed")) {
      $("video").hidden = true;
      $("picture").hidden = false;
      $("picture").src = `data:image/${data.output_format};base64,${data.b64_json}`;
      $("picture").alt = body.prompt;
      caption(body.prompt, data);
    }
  }
}

async function drawVideo(body, signal) {
  const made = await (await api("/v1/videos", {
    method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  })).json();
  state.videoId = made.id;
  const answer = await api(`/v1/videos/${made.id}/events`, { signal });
  for await (const data of serverEvents(answer)) {
    follow({ ...data, progress: data.progress / 100, steps: 0 });
    if (data.status === "failed") throw new Error(data.error.message);
    if (data.status === "completed") {
      const file = await (await api(`/v1/videos/${made.id}/content`, { signal })).blob();
      if ($("video").src) URL.revokeObjectURL($("video").src);
      $("video").src = URL.createObjectURL(file);
      $("video").hidden = false;
      $("picture").hidden = true;
      caption(body.prompt, data);
      return;
    }
  }
}

$("ask").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  if (state.busy) return;
  const body = words();
  state.busy = true;
  state.controller = new AbortController();
  $("go").disabled = true;
  $("stop").disabled = false;
  $("error").hidden = true;
  show(0, "Asking…");
  try {
    await (state.video ? drawVideo : drawPicture)(body, state.controller.signal);
    show(1, "Done.");
  } catch (error) {
    const cancelled = error.name === "AbortError";
    show(0, cancelled ? "Cancelled." : "Failed.");
    $("error").textContent = cancelled ? "" : error.message;
    $("error").hidden = cancelled;
  } finally {
    state.busy = false;
    state.videoId = null;
    $("go").disabled = false;
    $("stop").disabled = true;
  }
});

$("stop").addEventListener("click", () => {
  if (state.videoId) api(`/v1/videos/${state.videoId}`, { method: "DELETE" }).catch(() => {});
  state.controller?.abort();
});

// ---------------------------------------------------------------- looking

function drawComponents(components) {
  const root = $("components");
  if (!components.length) {
    root.innerHTML = '<p class="hint">Nothing is offloaded: all weights stay on the device.</p>';
    return;
  }
  if (root.childElementCount !== components.length || root.querySelector(".hint")) {
    root.replaceChildren(...components.map(() => {
      const element = document.createElement("div");
      element.className = "component";
      element.innerHTML = '<b></b> <span class="note"></span><div class="blocks"></div>';
      return element;
    }));
  }
  components.forEach((component, i) => {
    const element = root.children[i];
    element.dataset.name = component.name;
    element.querySelector("b").textContent = component.name;
    const all = [...component.others, ...component.blocks];
    const there = all.reduce((n, b) => n + (b.at === "host" ? 0 : b.bytes), 0);
    element.querySelector(".note").textContent =
      `${component.placement} · ${bytes(Math.min(there, component.bytes))} of ${bytes(component.bytes)} on the device`;
    const row = element.querySelector(".blocks");
    while (row.childElementCount < all.length) row.append(document.createElement("i"));
    all.forEach((block, k) => {
      row.children[k].className = (k < component.others.length ? "outside " : "") + block.at;
      row.children[k].title = `${block.name}: ${bytes(block.bytes)}, ${block.at}`;
    });
  });
}

function drawMemory(live) {
  const most = Math.max(...state.history.map((h) => h.allocated), 1);
  const scale = Math.max(live.budget || 0, most) * 1.1;
  $("used").style.width = `${Math.min(100, (100 * live.allocated) / scale)}%`;
  $("limit").hidden = !live.budget;
  if (live.budget) $("limit").style.left = `${(100 * live.budget) / scale}%`;
  const total = live.total ? ` of ${bytes(live.total)}` : "";
  const budget = live.budget ? `, budget ${bytes(live.budget)}` : "";
  $("memory").textContent = `${bytes(live.allocated)}${total} in use on ${live.device}${budget}`;
  const { context, width, height, color } = canvas("history");
  context.strokeStyle = color("--fixed");
  context.beginPath();
  for (const point of state.history) {
    const x = width - ((live.now - point.now) / 30) * width;
    const y = height - (point.allocated / scale) * height;
    context.lineTo(x, y);
  }
  context.stroke();
  if (live.budget) {
    context.strokeStyle = color("--bad");
    const y = height - (live.budget / scale) * height;
    context.strokeRect(0, y, width, 0);
  }
}

function canvas(id) {
  const element = $(id);
  const context = element.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  context.clearRect(0, 0, element.width, element.height);
  return { context, width: element.width, height: element.height, color: (name) => style.getPropertyValue(name).trim() };
}

function drawLanes() {
  const { context, width, height, color } = canvas("lanes");
  context.font = "12px system-ui";
  context.fillStyle = color("--ink");
  context.fillText("copy", 4, 14);
  context.fillText("compute", 4, height / 2 + 14);
  const last = state.events.length ? state.events[state.events.length - 1].end : 0;
  const span = 2;
  for (const e of state.events) {
    if (e.end < last - span) continue;
    const x = width - ((last - e.begin) / span) * width;
    const w = Math.max(2, ((e.end - e.begin) / span) * width);
    context.fillStyle = color(e.lane === "copy" ? "--copy" : "--compute");
    context.fillRect(x, e.lane === "copy" ? 20 : height / 2 + 20, w, height / 2 - 26);
  }
}

async function look() {
  try {
    const live = await (await api(`/v1/offload/live?since=${state.since}`)).json();
    state.since = live.last_event;
    state.events = [...state.events, ...live.events].slice(-2000);
    state.history.push({ now: live.now, allocated: live.allocated });
    state.history = state.history.filter((h) => live.now - h.now < 30);
    drawComponents(live.components);
    drawMemory(live);
    drawLanes();
  } catch { /* told by the badge */ }
  // Quickly while something happens, slowly otherwise; not at all behind another tab.
  const wait = document.hidden ? 2000 : state.busy ? 120 : 1000;
  setTimeout(look, wait);
}

async function health() {
  let word = "away";
  try {
    const body = await (await fetch("/health")).json();
    word = body.status;
    $("health").title = `${body.waiting} waiting`;
  } catch { /* away */ }
  $("health").textContent = word;
  $("health").className = `badge ${word}`;
  setTimeout(health, 3000);
}

async function start() {
  health();
  look();
  try {
    const offload = await (await api("/v1/offload")).json();
    $("model").textContent = `${offload.model} · ${offload.pipeline} on ${offload.device}`;
    state.video = offload.makes_videos;
    for (const element of document.querySelectorAll(".video")) element.hidden = !state.video;
  } catch (error) {
    $("model").textContent = error.message;
    $("key").addEventListener("change", start, { once: true });
  }
}

start();
