// The interactive view of a trace: timeline, step by step, with the block map that follows.
//
// mount(element, frame, callbacks) needs nothing but a browser; Jupyter calls it through `render` at the
// end, a web page can call it itself. A frame is what view.py's `frame` makes. It holds the timeline as
// an SVG and the changes of every step, so that playing and scrubbing ask nobody.
//
// callbacks: send(message) to whoever made the frame, leave() when Escape is pressed, save() for Ctrl+S.

const CSS = `
.lmv{font:13px/1.4 system-ui,sans-serif;color:#333;color:light-dark(#333,#ddd);background:#fff;background:light-dark(#fff,#111);
  max-width:1200px;padding:4px 0;display:flex;flex-direction:column;reading-flow:flex-visual;container:lmv/inline-size}
.lmv *{box-sizing:border-box}
.lmv-bar,.lmv-controls,.lmv-actions,.lmv-presets{display:flex;flex-wrap:wrap;gap:4px;align-items:center;margin:4px 8px}
.lmv-presets,.lmv-controls,.lmv-actions{font-size:12px}
.lmv-controls{display:grid;grid-template-columns:repeat(auto-fill,minmax(180px,1fr));gap:1px 16px}
.lmv-control{display:grid;grid-template-columns:1fr auto;column-gap:6px;align-items:center;min-width:0}
.lmv-control input{grid-column:1/3;width:100%;margin:0;height:18px}
.lmv-choice{grid-template-columns:auto 1fr}
.lmv-control select{min-width:0}
.lmv-control output{font-variant-numeric:tabular-nums;font-weight:600}
.lmv button,.lmv select,.lmv textarea{font:inherit;color:inherit;background:#f4f4f4;background:light-dark(#f4f4f4,#262626);
  border:1px solid #767676;border-radius:4px;padding:0 5px;min-height:24px}
.lmv button:hover:enabled{background:#e4e4e4;background:light-dark(#e4e4e4,#3a3a3a)}
.lmv button:disabled{opacity:.55}
.lmv button[aria-pressed=true]{border-color:#0072b2;border-color:light-dark(#0072b2,#3d9bd6);border-width:2px;font-weight:600}
.lmv input[type=range]{accent-color:#0072b2;accent-color:light-dark(#0072b2,#3d9bd6)}
.lmv :focus-visible{outline:3px solid #0072b2;outline:3px solid light-dark(#0072b2,#7cc4f2);outline-offset:1px}
.lmv-step{flex:1 1 180px;min-width:100px}
.lmv-picture{cursor:crosshair;max-width:100%;overflow-x:auto}
.lmv-map{overflow-x:auto}
.lmv-sheet,.lmv-map svg{position:relative;min-width:620px}
.lmv-idea{display:none;margin:0 8px 4px}
.lmv-picture svg{display:block;width:100%;height:auto}
.lmv-picture .lmv-over{position:absolute;inset:0;pointer-events:none}
.lmv-band{fill:#333;fill:light-dark(#333,#fff);opacity:.17}
.lmv-row{fill:none;stroke:#333;stroke:light-dark(#333,#fff);stroke-width:2}
.lmv-own{fill:none;stroke:#111;stroke:light-dark(#111,#fff)}
.lmv-story{margin:2px 8px 6px;min-height:2.8em}
.lmv-status{font-variant-numeric:tabular-nums}
.lmv-note{color:#9c3f77;color:light-dark(#9c3f77,#e39ac4);font-weight:600}
.lmv-hidden{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.lmv table{border-collapse:collapse;margin:3px 8px;font-variant-numeric:tabular-nums;font-size:13px}
.lmv th,.lmv td{padding:0 22px 0 0;text-align:right;font-weight:400;background:none;border:0;color:inherit}
.lmv th,.lmv td{white-space:nowrap}
.lmv th:first-child{text-align:left}
.lmv-readouts{overflow-x:auto}
.lmv td{font-weight:600}
.lmv textarea{width:calc(100% - 16px);margin:6px 8px;height:13em;font:12px/1.4 ui-monospace,monospace}
.lmv-request{display:grid;grid-template-columns:9em 1fr auto;gap:10px;align-items:start;margin:4px 8px;
  border-left:3px solid #767676;padding-left:8px}
.lmv-request p{margin:0;white-space:pre-wrap;max-height:7.2em;overflow:auto;overflow-wrap:anywhere}
.lmv-request span{color:#6a6a6a;color:light-dark(#6a6a6a,#9aa0a6)}
@container lmv (max-width:600px){
  .lmv table{font-size:12px}.lmv th,.lmv td{padding-right:clamp(5px,1.6cqi,10px)}.lmv th{font-size:11px;white-space:normal;vertical-align:bottom}
}
@media (max-height:600px){@container lmv (max-width:620px){ /* a page at 200 %: settings in a strip, so that they are in sight with the picture */
  .lmv-presets,.lmv-controls{flex-wrap:nowrap;overflow-x:auto;scrollbar-width:thin;padding:3px}
  .lmv-presets button{flex:none}
  .lmv-controls{grid:auto/auto-flow 180px}
  .lmv-bar,.lmv-texts{order:1}
  .lmv-readouts,.lmv-story,.lmv-map,.lmv-exports{order:2}
}}
@media (prefers-reduced-motion:reduce){.lmv *{transition:none;animation:none;scroll-behavior:auto}}
`;
const WHY = {
  seq_budget: "as many requests are in flight as max_num_seqs allows",
  token_budget: "the step's token budget is spent",
  partial_prefill_cap: "as many prompts are half-filled as max_num_partial_prefills allows",
  kv_blocks: "there are not enough free KV blocks",
  decode_share: "decode has had its share of the budget while prefill waits",
  queue: "it is behind one that can't go on",
};
const OWNERS = 5; // colours of owners, lm-own0 … in the timeline's style; then the same ones hatched
const PLAY_SECONDS = 12; // a whole run at speed 1
const PITCHES = [32, 28, 24, 20, 16, 14, 12, 10, 8];
const MAP_WIDTH = 960, MAP_ROOM = 230, MAP_LEFT = 62, GAP = 2;
let views = 0; // each has a hatch of its own to refer to

const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const seconds = (t) => (t >= 1 ? `${+t.toFixed(2)} s` : t >= 0.001 ? `${+(t * 1e3).toFixed(1)} ms` : `${+(t * 1e6).toFixed(0)} µs`);
const box = (x, y, w, h) => `M${x} ${y}h${w}v${h}h-${w}z`;

// Elements that can have the focus carry the attribute by which JupyterLab leaves their keys alone.
function make(parent, tag, { text, ...attributes } = {}) {
  const element = document.createElement(tag);
  if (/^(button|input|select|textarea|summary)$/.test(tag) || "tabindex" in attributes) attributes["data-lm-suppress-shortcuts"] = "true";
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function svgPath(parent, kind) {
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("class", kind);
  parent.append(path);
  return path;
}

// ---- one run: what is known of it at a step -------------------------------------------------------

// Plays the pool forwards and backwards: holders of each block, the block table of each request.
class Run {
  constructor(panel) {
    Object.assign(this, panel);
    const count = this.pool.num_blocks;
    this.tables = this.requests.map(() => []);
    this.holders = Array.from({ length: count }, () => []);
    this.cached = new Uint8Array(count);
    this.at = -1;
    this.places = null;
  }

  // A request's number among those that hold blocks at the same time, as read_pool (block_map.py) has it: the lowest that
  // was free when it took its first block. Worked out once for the whole run, since it follows from what came before.
  place(request, step) {
    this.places ??= this.givePlaces();
    return this.places[request].findLast(([from]) => from <= step)?.[1] ?? 0;
  }

  givePlaces() {
    const held = this.requests.map(() => 0), now = held.map(() => -1), places = held.map(() => []);
    const order = new Map(); // requests, as they first took a block
    this.pool.changes.forEach((events, step) => {
      const touched = new Set();
      for (let i = 0; i < events.length; i += 3) {
        const owner = events[i + 1];
        if (owner < 0) continue;
        if (!order.has(owner)) order.set(owner, order.size);
        held[owner] += events[i + 2];
        touched.add(owner);
      }
      const changed = [...touched].sort((a, b) => order.get(a) - order.get(b));
      for (const owner of changed) if (!held[owner]) now[owner] = -1;
      for (const owner of changed) {
        if (!held[owner] || now[owner] >= 0) continue;
        const taken = new Set(now);
        let place = 0;
        while (taken.has(place)) place += 1;
        now[owner] = place;
        places[owner].push([step, place]);
      }
    });
    return places;
  }

  get steps() { return this.ends.length; }

  change(events, from, to, by, sign) {
    for (let i = from; i !== to; i += by) {
      const block = events[i], owner = events[i + 1], taken = events[i + 2] * sign > 0;
      if (owner < 0) this.cached[block] = taken ? 1 : 0;
      else if (taken) { this.holders[block].push(owner); this.tables[owner].push(block); }
      else {
        this.holders[block].splice(this.holders[block].lastIndexOf(owner), 1);
        this.tables[owner].splice(this.tables[owner].lastIndexOf(block), 1);
      }
    }
  }

  go(step) {
    while (this.at < step) { const e = this.pool.changes[++this.at]; this.change(e, 0, e.length, 3, 1); }
    while (this.at > step) { const e = this.pool.changes[this.at--]; this.change(e, e.length - 3, -3, -3, -1); }
  }

  // The span of a request at a step: [kind, first step, last step, …], or undefined.
  span(request, step) {
    return this.requests[request].spans.find(([, first, last]) => first <= step && step <= last);
  }

  // Tokens of a request in the cache after a step.
  reached(request, step) {
    let tokens = 0;
    for (const [kind, first, last, a, b] of this.requests[request].spans) {
      if (first > step) break;
      if (kind === "p") tokens = b + 1;
      if (kind === "d") tokens = a + Math.min(step, last) - first + 1;
      if (kind === "x") tokens = 0;
    }
    return tokens;
  }

  story(request, step) {
    const { name, prompt, arrival, end, reason, spans } = this.requests[request];
    const held = this.blocks(request, step);
    const blocks = held ? ` It holds ${plural(held, "block")}${this.at === step ? ` (${this.list(request)})` : ""}.` : "";
    const fell = spans.some(([kind, at]) => kind === "x" && at === step) ? " It was preempted: its blocks went to others." : "";
    const span = this.span(request, step);
    let what = "";
    if (span?.[0] === "p") {
      what = `prefill of tokens ${span[3]}–${span[4]} (${plural(span[4] - span[3] + 1, "token")} of a prompt of ${prompt}).`;
    } else if (span?.[0] === "d") {
      what = `decode: the token at position ${span[3] + step - span[1]} goes in, the next one comes out.`;
    } else if (span?.[0] === "w") {
      what = `waits: ${WHY[span[3]] ?? span[3]} (${span[3]}), for ${plural(span[2] - span[1] + 1, "step")} in all.`;
    } else if (end !== null && step >= end) what = `is finished (${reason}).`;
    else if (step < arrival) what = "has not arrived yet.";
    else what = "gets nothing.";
    return `${name}, step ${this.numbers[step]}: ${what}${fell}${end !== null && step >= end ? "" : blocks}`;
  }

  blocks(request, step) { return this.at === step ? this.tables[request].length : Math.ceil(this.reached(request, step) / this.pool.block_size); }

  list(request) {
    const table = this.tables[request];
    return table.length > 12 ? `${table.slice(0, 6).join(", ")} … ${table.slice(-3).join(", ")}` : table.join(", ");
  }

  status(step) {
    const [decode, prefill] = this.used[step];
    const [used, cached] = this.pool.counts[step];
    return `Step ${this.numbers[step]} of ${this.numbers[this.steps - 1]}, ends at ${seconds(this.ends[step])}, took `
      + `${seconds(this.ends[step] - this.starts[step])}: ${decode} decode + ${prefill} prefill of ${this.budget} tokens; `
      + `${used} of ${this.pool.num_blocks} blocks used${cached ? `, ${cached} free with their content kept` : ""}.`;
  }
}

// ---- the view -------------------------------------------------------------------------------------

class View {
  constructor(element, callbacks) {
    this.callbacks = callbacks;
    this.hatch = `lmv-hatch${++views}`;
    this.step = 0; this.panel = 0; this.request = -1; this.playing = null; this.follow = true;
    this.busy = false; this.wanted = null; this.values = {}; this.rows = new Map();
    const root = (this.root = make(element, "div", { class: "lmv", role: "group" }));
    make(root, "style", { text: CSS });
    this.style = make(root, "div", { hidden: "" }); // the picture's own
    this.form = make(root, "div", { class: "lmv-form" });
    this.note = make(root, "div", { class: "lmv-note lmv-bar", role: "alert" });
    this.readouts = make(root, "div", { class: "lmv-readouts" });
    this.makeBar(root);
    this.picture = make(root, "div", { class: "lmv-picture", tabindex: "0", role: "application", "aria-roledescription": "timeline" });
    this.texts = make(root, "div", { class: "lmv-texts" });
    this.story = make(root, "div", { class: "lmv-story" });
    this.map = make(root, "div", { class: "lmv-map" });
    this.exports = make(root, "div", { class: "lmv-exports" });
    this.extra = make(root, "div");
    this.live = make(root, "div", { class: "lmv-hidden", role: "status", "aria-live": "polite" });
    this.picture.addEventListener("pointermove", (event) => this.hover(event));
    this.picture.addEventListener("pointerleave", () => this.tell());
    this.picture.addEventListener("click", (event) => this.pick(event));
    this.picture.addEventListener("keydown", (event) => this.key(event));
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { this.pause(); callbacks.leave?.(); }
      if (event.key.toLowerCase() === "s" && (event.ctrlKey || event.metaKey) && callbacks.save) { event.preventDefault(); callbacks.save(); }
      event.stopPropagation();
    });
  }

  makeBar(root) {
    const bar = (this.bar = make(root, "div", { class: "lmv-bar", role: "group", "aria-label": "Playing" }));
    const button = (text, name, act) => {
      const made = make(bar, "button", { type: "button", text, "aria-label": name, title: name });
      made.addEventListener("click", act);
      return made;
    };
    button("◀", "One step back", () => this.go(this.step - 1));
    this.playButton = button("▶ Play", "Play", () => (this.playing ? this.pause() : this.play()));
    button("▶", "One step on", () => this.go(this.step + 1));
    this.slider = make(bar, "input", { type: "range", class: "lmv-step", min: 0, step: 1, "aria-label": "Step" });
    this.slider.addEventListener("input", () => this.go(+this.slider.value));
    const label = make(bar, "label", { text: "Speed " });
    this.speed = make(label, "select");
    for (const speed of [0.25, 0.5, 1, 2, 4]) make(this.speed, "option", { value: speed, text: `${speed}×` });
    this.speed.value = "1";
  }

  // ---- a new frame ----

  update(frame) {
    if (frame.controls && !this.controls) this.makeForm(frame);
    if (frame.values) this.showValues(frame);
    this.note.textContent = frame.error ?? "";
    this.note.hidden = !frame.error;
    if (frame.readouts) this.showReadouts(frame.readouts);
    if (frame.texts) this.showTexts(frame);
    if (frame.panels) this.showPanels(frame);
    if ("seq" in frame) { this.answered(); this.sum(frame.error ?? frame.summary); }
  }

  showPanels(frame) {
    const wasLast = !this.runs || this.step >= this.run.steps - 1;
    this.root.setAttribute("aria-label", frame.summary);
    this.frame = frame;
    this.runs = frame.panels.map((panel) => new Run(panel));
    this.panel = Math.min(this.panel, this.runs.length - 1);
    if (this.panel < this.runs.length - 1 && frame.newest) this.panel = this.runs.length - 1;
    const [style] = frame.svg.match(/<style>.*?<\/style>/);
    if (this.style.innerHTML !== style) this.style.innerHTML = style; // once: a new style sheet costs the whole page
    this.picture.innerHTML = `<div class="lmv-sheet">${frame.svg.replace(style, "")}`
      + `<svg class="lmv-over" viewBox="0 0 ${frame.width} ${frame.height}" aria-hidden="true"><path class="lmv-band"/><path class="lmv-row"/></svg></div>`;
    this.picture.querySelector("svg").setAttribute("aria-hidden", "true"); // the picture's own name says it
    [this.band, this.row] = this.picture.querySelectorAll(".lmv-over path");
    this.request = Math.min(this.request, this.run.requests.length - 1);
    const last = Math.max(0, this.run.steps - 1);
    this.makeMap();
    this.go(frame.follow && wasLast && this.follow ? last : Math.min(this.step, last), true);
  }

  get run() { return this.runs[this.panel]; }

  // ---- the chosen step ----

  go(step, quiet = false) {
    const last = this.run.steps - 1;
    this.step = Math.max(0, Math.min(step, last));
    this.follow = this.step >= last;
    this.slider.max = Math.max(0, last);
    this.slider.value = this.step;
    if (last < 0) { this.story.textContent = "No step has run yet."; return; }
    this.run.go(this.step);
    const { left, right, top, bottom } = this.run;
    this.band.setAttribute("d", box(left[this.step], top, Math.max(1, right[this.step] - left[this.step]), bottom - top));
    this.drawRow();
    this.drawMap();
    this.tell(quiet);
  }

  drawRow() {
    const row = this.run.rows.find((row) => row.requests.includes(this.request));
    this.row.setAttribute("d", row ? box(this.run.x0, row.top - 2, this.run.x1 - this.run.x0, row.height + 4) : "");
  }

  // What is to be said of the chosen step and request; to a screen reader too, once it rests.
  tell(quiet = false) {
    if (this.run.steps < 1) return;
    const status = this.run.status(this.step);
    const story = this.request >= 0 ? this.run.story(this.request, this.step) : "";
    this.story.replaceChildren();
    make(this.story, "div", { class: "lmv-status", text: status });
    make(this.story, "div", { text: story || "Point at a cell, or choose one with the arrow keys, to read its story." });
    this.slider.setAttribute("aria-valuetext", status);
    this.picture.setAttribute("aria-label", `${this.frame.alt} Arrow keys: left and right for steps, up and down for requests.`);
    clearTimeout(this.saying);
    if (!quiet && !this.playing) this.saying = setTimeout(() => { this.live.textContent = story || status; }, 350);
  }

  // (panel, step, request) under the pointer.
  under(event) {
    const frame = this.picture.firstChild.getBoundingClientRect();
    const x = ((event.clientX - frame.left) / frame.width) * this.frame.width;
    const y = ((event.clientY - frame.top) / frame.height) * this.frame.height;
    const panel = Math.max(0, this.runs.findLastIndex((run) => y >= run.top - 30));
    const run = this.runs[panel];
    if (!run.steps) return null;
    let step = run.right.findIndex((right) => x < right);
    if (step < 0) step = run.steps - 1;
    const row = run.rows.find((row) => y >= row.top - 1 && y <= row.top + row.height + 1);
    return { panel, step, request: row ? this.speaker(run, row, step) : -1 };
  }

  // Of several requests in a row, one that does something in the step.
  speaker(run, row, step) { return row.requests.find((request) => run.span(request, step)) ?? row.requests[0]; }

  hover(event) {
    const cell = this.under(event);
    if (!cell || this.playing) return;
    const run = this.runs[cell.panel];
    this.story.lastChild.textContent = cell.request >= 0 ? run.story(cell.request, cell.step) : run.status(cell.step);
  }

  pick(event) {
    const cell = this.under(event);
    if (!cell) return;
    this.pause();
    this.choose(cell.panel, cell.request, cell.step);
  }

  choose(panel, request, step) {
    const moved = panel !== this.panel;
    this.panel = panel; this.request = request;
    if (moved) this.makeMap();
    this.go(step);
  }

  key(event) {
    const jumps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (event.key in jumps) { this.pause(); this.go(this.step + jumps[event.key]); }
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") this.moveRow(event.key === "ArrowDown" ? 1 : -1);
    else if (event.key === " " || event.key === "Enter") this.playing ? this.pause() : this.play();
    else return;
    event.preventDefault();
  }

  // To the next request; from the last of one run to the first of the run below.
  moveRow(by) {
    this.pause();
    const next = this.request + by;
    if (next >= 0 && next < this.run.requests.length) this.choose(this.panel, next, this.step);
    else if (next >= this.run.requests.length && this.panel + 1 < this.runs.length) this.choose(this.panel + 1, 0, this.step);
    else if (next < 0 && this.panel > 0) this.choose(this.panel - 1, this.runs[this.panel - 1].requests.length - 1, this.step);
  }

  // Time passes as it did in the run, so that a stall is felt.
  play() {
    if (this.step >= this.run.steps - 1) this.go(0);
    const { run } = this;
    const total = run.ends[run.steps - 1] || 1;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    let position = run.ends[this.step], before = performance.now(), drawn = before;
    this.playButton.textContent = "⏸ Pause";
    this.playButton.setAttribute("aria-label", "Pause");
    const tick = (now) => {
      position += ((now - before) / 1e3) * (total / PLAY_SECONDS) * +this.speed.value;
      before = now;
      let step = this.step;
      while (step < run.steps - 1 && run.ends[step] <= position) step += 1;
      if (step !== this.step && (!calm || now - drawn > 500)) { drawn = now; this.go(step, true); }
      if (this.step >= run.steps - 1 || this.run !== run) this.pause();
      else this.playing = requestAnimationFrame(tick);
    };
    this.playing = requestAnimationFrame(tick);
  }

  pause() {
    if (!this.playing) return;
    cancelAnimationFrame(this.playing);
    this.playing = null;
    this.playButton.textContent = "▶ Play";
    this.playButton.setAttribute("aria-label", "Play");
    this.tell();
  }

  // ---- the block map ----

  makeMap() {
    const { num_blocks: count } = this.run.pool;
    if (this.grid?.count === count) return;
    let each = 1, pitch, columns;
    for (;; each *= 2) {
      pitch = PITCHES.find((size) => Math.ceil(Math.ceil(count / each) / this.columns(size)) * size <= MAP_ROOM);
      if (pitch) break;
    }
    columns = this.columns(pitch);
    const cells = Math.ceil(count / each), lines = Math.ceil(cells / columns);
    this.grid = { count, each, pitch, columns, cells };
    const rowTexts = Array.from({ length: lines }, (_, row) => row).filter((row) => row % Math.ceil(13 / pitch) === 0)
      .map((row) => `<text class="lm-mute lm-e" x="${MAP_LEFT - 6}" y="${26 + row * pitch + pitch / 2 + 4}">${row * columns * each}</text>`).join("");
    const title = `KV blocks, ${each > 1 ? `${each} to a cell, ` : ""}by owner: a colour, or a colour and a hatch. Underlined: written in this step; corner: shared; stroke: free with its content kept.`;
    const height = 30 + lines * pitch;
    this.map.innerHTML = `<svg class="lm-t" viewBox="0 0 ${MAP_WIDTH} ${height}" role="img"><rect class="lm-bg" width="${MAP_WIDTH}" height="${height}"/>`
      + `<pattern id="${this.hatch}" width="6" height="6" patternUnits="userSpaceOnUse"><path class="lm-mesh" d="M-1 1l2-2M0 6l6-6M5 7l2-2"/></pattern>`
      + `<text class="lm-mute" x="16" y="16">${title}</text>${rowTexts}<g></g></svg>`;
    this.mapSvg = this.map.firstChild;
    const group = this.mapSvg.querySelector("g");
    this.paths = {};
    for (const kind of ["free", ...Array.from({ length: OWNERS }, (_, i) => `own${i}`), "mesh", "part", "kept", "cellgrid", "shared", "write"]) {
      this.paths[kind] = svgPath(group, kind === "mesh" ? "lmv-mesh" : `lm-${kind}`);
    }
    this.paths.mesh.setAttribute("fill", `url(#${this.hatch})`);
    this.outline = svgPath(group, "lmv-own");
    this.outline.setAttribute("stroke-width", pitch < 14 ? 1 : 2);
    let lineWork = "";
    for (let row = 0; row < lines; row++) lineWork += box(MAP_LEFT, 26 + (row + 1) * pitch - GAP, Math.min(columns, cells - row * columns) * pitch, GAP);
    for (let column = 1; column <= columns; column++) lineWork += box(MAP_LEFT + column * pitch - GAP, 26, GAP, lines * pitch);
    this.paths.cellgrid.setAttribute("d", lineWork);
    this.names = document.createElementNS("http://www.w3.org/2000/svg", "g");
    group.append(this.names);
  }

  columns(pitch) { return Math.floor((MAP_WIDTH - MAP_LEFT - 16) / pitch / 8) * 8; }

  // Which tokens each block holds follows from the tables; the last block of a request is partly filled.
  drawMap() {
    const { run, grid: { each, pitch, columns, cells } } = this;
    const size = run.pool.block_size, side = pitch - GAP, d = { free: "", mesh: "", part: "", kept: "", shared: "", write: "" };
    for (let i = 0; i < OWNERS; i++) d[`own${i}`] = "";
    const fill = new Map(), written = new Set();
    let outline = "", names = "";
    const place = (block) => {
      const cell = Math.floor(block / each);
      return [MAP_LEFT + (cell % columns) * pitch, 26 + Math.floor(cell / columns) * pitch];
    };
    run.tables.forEach((table, request) => {
      if (!table.length) return;
      const reached = run.reached(request, this.step);
      const last = Math.min(size, Math.max(1, reached - size * (table.length - 1)));
      if (last < size && run.holders[table.at(-1)].length === 1) fill.set(table.at(-1), last);
      const span = run.span(request, this.step);
      if (span?.[0] === "d" || span?.[0] === "p") {
        const from = span[0] === "d" ? reached - 1 : span[3];
        for (let i = Math.floor(from / size); i < table.length; i++) written.add(table[i]);
      }
      if (request === this.request) for (const block of table) outline += box(...place(block).map((v) => v + 1), side - 2, side - 2);
    });
    const ownerOf = (cell) => {
      for (let block = cell * each; block < Math.min((cell + 1) * each, run.holders.length); block++) {
        if (run.holders[block].length) return Math.min(...run.holders[block]); // of several, the one that came first
      }
      return -1;
    };
    for (let first = 0, end; first < cells; first = end) {
      const owner = ownerOf(first), line = Math.floor(first / columns);
      for (end = first + 1; end < cells && end < (line + 1) * columns && ownerOf(end) === owner;) end += 1;
      const [x, y] = place(first * each), width = (end - first) * pitch, number = owner < 0 ? 0 : run.place(owner, this.step);
      const kind = owner < 0 ? "free" : `own${number % OWNERS}`, hatched = Math.floor(number / OWNERS) % 2 === 1;
      d[kind] += box(x, y, width, pitch);
      if (hatched) d.mesh += box(x, y, width, pitch);
      if (owner >= 0 && pitch >= 14) {
        const { name } = run.requests[owner], need = name.length * 6 + 2, middle = x + (need <= side ? side : width - GAP) / 2;
        if (need > width - GAP) continue;
        if (hatched) names += `<path class="lm-${kind}" d="${box(middle - need / 2, y + (side - 11) / 2, need, 11)}"/>`;
        names += `<text class="lm-on lm-m lm-s" x="${middle}" y="${y + side / 2 + 3}">${escapeText(name)}</text>`;
      }
    }
    const edge = Math.max(1, Math.floor(pitch / 12)); // what a block lacks has a frame of its owner's colour
    for (const [block, tokens] of each === 1 ? fill : []) {
      const [x, y] = place(block), part = Math.max(edge, Math.floor((tokens * side) / size));
      if (part < side - edge) d.part += box(x + part, y + edge, side - edge - part, side - 2 * edge);
    }
    run.cached.forEach((is, block) => {
      if (!is) return;
      const [x, y] = place(block);
      d.kept += `M${x} ${y + side}l${side}-${side}`;
    });
    const corner = 2 * Math.max(3, pitch >> 2), bar = Math.max(2, pitch >> 3);
    run.holders.forEach((holders, block) => {
      if (holders.length < 2) return;
      const [x, y] = place(block);
      d.shared += `M${x + side - corner} ${y}h${corner}v${corner}z`;
    });
    for (const block of written) { const [x, y] = place(block); d.write += box(x, y + side - bar, side, bar); }
    for (const [kind, path] of Object.entries(d)) this.paths[kind].setAttribute("d", path);
    this.outline.setAttribute("d", outline);
    this.names.innerHTML = names;
    const [used, cached] = run.pool.counts[this.step];
    this.mapSvg.setAttribute("aria-label", `Block map at step ${run.numbers[this.step]}: ${used} of ${run.holders.length} blocks used, ${cached} free with their content kept.`);
  }

  // ---- controls, readouts, actions: for the lab ----

  makeForm(frame) {
    this.controls = new Map();
    if (frame.presets) {
      const row = make(this.form, "div", { class: "lmv-presets", role: "group", "aria-label": "Presets" });
      for (const { key, label, idea } of frame.presets) {
        const button = make(row, "button", { type: "button", text: label, title: idea, "aria-pressed": "false" });
        button.addEventListener("click", () => this.ask({ kind: "preset", key }));
        this.controls.set(`preset ${key}`, { button, idea });
      }
      this.idea = make(this.form, "div", { class: "lmv-idea" }); // shown by a page that has the room
    }
    const grid = make(this.form, "div", { class: "lmv-controls", role: "group", "aria-label": "Settings" });
    for (const { key, label, values, help } of frame.controls) {
      const isRange = values.length > 1 && values.every(([value]) => typeof value === "number" || value === null);
      const box = make(grid, "label", { class: isRange ? "lmv-control" : "lmv-control lmv-choice", title: help });
      make(box, "span", { text: label });
      const output = isRange ? make(box, "output") : null;
      const input = isRange ? make(box, "input", { type: "range", min: 0, max: values.length - 1, step: 1 }) : make(box, "select");
      if (!isRange) values.forEach(([, words], index) => make(input, "option", { value: index, text: words }));
      input.setAttribute("aria-label", label);
      input.addEventListener("input", () => {
        this.values[key] = values[+input.value][0];
        this.showControl(key);
        this.ask({ kind: "set", values: { ...this.values } });
      });
      this.controls.set(key, { input, output, values, isRange });
    }
    if (frame.actions) {
      const row = make(this.exports, "div", { class: "lmv-actions", role: "group", "aria-label": "Export" });
      for (const { key, label, help } of frame.actions) {
        const button = make(key === "pin" ? this.bar : row, "button", { type: "button", text: label, title: help });
        button.addEventListener("click", () => this.ask({ kind: "action", key }));
        this.controls.set(`action ${key}`, { button });
      }
    }
  }

  showControl(key) {
    const { input, output, values, isRange } = this.controls.get(key);
    const index = values.findIndex(([value]) => value === this.values[key]);
    input.value = index;
    if (!isRange) return;
    output.textContent = values[index][1];
    input.setAttribute("aria-valuetext", values[index][1]);
  }

  showValues(frame) {
    if (this.wanted) return; // a newer choice is on its way
    this.values = { ...frame.values };
    for (const key of Object.keys(this.values)) this.showControl(key);
    for (const [key, { button }] of this.controls) {
      if (key.startsWith("preset ")) button.setAttribute("aria-pressed", key === `preset ${frame.preset}`);
    }
    if (this.idea) this.idea.textContent = this.controls.get(`preset ${frame.preset}`)?.idea ?? "";
    const pin = this.controls.get("action pin")?.button;
    if (pin) pin.textContent = frame.pinned ? "Unpin A" : "Pin as A";
  }

  // One question at a time; while it is open, only the newest is kept.
  ask(message) {
    const isOpen = this.busy && performance.now() - this.asked < 5000; // an answer may get lost
    if (isOpen && message.kind === "set") { this.wanted = message; return; }
    this.busy = true;
    this.asked = performance.now();
    this.callbacks.send?.(message);
  }

  answered() {
    this.busy = false;
    const next = this.wanted;
    this.wanted = null;
    if (next) this.ask(next);
  }

  // To a screen reader, once it rests: what a new run comes to, or why there is none.
  sum(words) {
    clearTimeout(this.saying);
    this.saying = setTimeout(() => { this.live.textContent = words; }, 350);
  }

  showReadouts({ columns, rows }) {
    const cells = rows.map(([name, ...values]) => `<tr><th scope="row">${escapeText(name)}</th>${values.map((value) => `<td>${escapeText(value)}</td>`).join("")}</tr>`);
    const head = columns.map((name) => `<th scope="col">${escapeText(name)}</th>`).join("");
    this.readouts.innerHTML = `<table><caption class="lmv-hidden">Readouts</caption><thead><tr>${head}</tr></thead><tbody>${cells.join("")}</tbody></table>`;
  }

  // ---- texts that stream, each with its cancel button ----

  showTexts({ texts, run }) {
    for (const { id, text, state, can_cancel: canCancel } of texts) {
      let row = this.rows.get(id);
      if (!row) {
        const line = make(this.texts, "div", { class: "lmv-request" });
        row = { name: make(line, "div"), text: make(line, "p"), button: make(line, "button", { type: "button", text: "Cancel", "aria-label": `Cancel ${id}` }) };
        make(row.name, "b", { text: id });
        row.state = make(make(row.name, "div"), "span");
        row.button.addEventListener("click", () => this.cancel(id));
        this.rows.set(id, row);
      }
      row.text.textContent = text;
      row.text.scrollTop = row.text.scrollHeight;
      if (row.state.textContent !== state) row.state.textContent = state;
      row.button.disabled = !canCancel;
      if (!canCancel) clearTimeout(row.waiting);
    }
    this.running = run;
  }

  cancel(id) {
    const row = this.rows.get(id);
    row.state.textContent = "cancelling …";
    row.waiting = setTimeout(() => {
      this.note.hidden = false;
      this.note.textContent = "The kernel is busy and did not hear that. To stop the run, use the square (interrupt) in the toolbar.";
    }, 1000);
    this.callbacks.send?.({ kind: "cancel", request: id, run: this.running });
  }

  // ---- messages that are no frames ----

  receive({ kind, ...message }) {
    if (kind === "download") {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([message.text], { type: message.type }));
      link.download = message.name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
      this.live.textContent = `${message.name} is being saved.`;
    } else if (kind === "code") {
      this.extra.replaceChildren();
      const area = make(this.extra, "textarea", { readonly: "", "aria-label": "These settings as Python code" });
      area.value = message.text;
      area.focus();
      area.select();
      const copying = navigator.clipboard?.writeText(message.text) ?? Promise.reject(); // not every page may use the clipboard
      copying.then(() => "The code is copied and shown below.", () => "The code is shown below, marked.")
        .then((words) => { this.live.textContent = words; });
    } else if (kind === "cancelled") clearTimeout(this.rows.get(message.request)?.waiting);
    if (kind !== "cancelled") this.answered();
  }

  destroy() {
    this.pause();
    clearTimeout(this.saying);
    for (const row of this.rows.values()) clearTimeout(row.waiting);
    this.root.remove();
  }
}

const escapeText = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");

export function mount(element, frame, callbacks = {}) {
  const view = new View(element, callbacks);
  view.update(frame);
  return view;
}

// ---- Jupyter, through anywidget -------------------------------------------------------------------

function render({ model, el }) {
  const cell = () => el.closest(".jp-Cell");
  const view = mount(el, { ...JSON.parse(model.get("setup")), ...JSON.parse(model.get("frame")) }, {
    send: (message) => model.send(message),
    leave: () => cell()?.focus(),
    save: () => {
      cell()?.focus();
      cell()?.dispatchEvent(new KeyboardEvent("keydown", { key: "s", code: "KeyS", keyCode: 83, ctrlKey: true, bubbles: true, cancelable: true }));
    },
  });
  const onFrame = () => view.update(JSON.parse(model.get("frame")));
  const onMessage = (message) => view.receive(message);
  model.on("change:frame", onFrame);
  model.on("msg:custom", onMessage);
  return () => {
    model.off("change:frame", onFrame);
    model.off("msg:custom", onMessage);
    view.destroy();
  };
}

export default { render };
