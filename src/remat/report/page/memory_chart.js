// Memory over the step on a canvas: plain and planned, or one of them by category. Zoom, pan, hover and keyboard.
// A canvas and not SVG: a step of 10,000 operations has 25,000 corners, of which at most one column a pixel is drawn.
"use strict";

function memoryChart(root, data, format) {
  const canvas = root.querySelector("canvas");
  const readout = root.querySelector(".readout");
  const context = canvas.getContext("2d");
  const margin = { left: 64, right: 10, top: 12, bottom: 30 };
  const curves = data.curves.map((curve) => prepared(curve, data));
  const state = { from: 0, to: 1, by: data.timed ? "time" : "run", show: "both", curve: 0, step: null, drag: null };
  const highest = Math.max(data.budget || 0, ...curves.map((curve) => curve.peak)) * 1.06 || 1;

  // Where each run begins, on both axes; one more entry than runs.
  function prepared(curve, all) {
    const ops = curve.ops || Array.from({ length: all.ops.kind.length }, (_, index) => index);
    const time = new Float64Array(ops.length + 1);
    const run = new Float64Array(ops.length + 1);
    const seen = new Map();
    const again = new Uint8Array(ops.length);
    for (let i = 0; i < ops.length; i++) {
      time[i + 1] = time[i] + all.ops.time[ops[i]];
      run[i + 1] = i + 1;
      const before = seen.get(ops[i]) || 0;
      again[i] = Math.min(255, before);
      seen.set(ops[i], before + 1);
    }
    let peakStep = 0;
    curve.bytes.forEach((size, i) => { if (size > curve.bytes[peakStep]) peakStep = i; });
    return { ...curve, ops, starts: { time, run }, again, peak: curve.bytes[peakStep] || 0, peakStep };
  }

  const starts = (curve) => curve.starts[state.by];
  const end = (curve) => starts(curve)[curve.ops.length] || 1;
  const longest = () => Math.max(...visible().map(end));
  const visible = () => (state.show === "both" ? curves : [curves[Math.min(Number(state.show), curves.length - 1)]]);
  const active = () => visible()[Math.min(state.curve, visible().length - 1)];

  function size() {
    const box = canvas.getBoundingClientRect();
    return { width: box.width, height: box.height };
  }
  function plotWidth() { return Math.max(1, size().width - margin.left - margin.right); }
  function toX(value) { return margin.left + ((value / longest() - state.from) / (state.to - state.from)) * plotWidth(); }
  function toValue(x) { return (state.from + ((x - margin.left) / plotWidth()) * (state.to - state.from)) * longest(); }
  function toY(bytes) {
    const { height } = size();
    return height - margin.bottom - (bytes / highest) * (height - margin.top - margin.bottom);
  }

  // The last run that begins at or before a value.
  function runAt(curve, value) {
    const begins = starts(curve);
    let low = 0, high = curve.ops.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (begins[middle] <= value) low = middle; else high = middle - 1;
    }
    return low;
  }

  // The run with the most bytes of those that a column of pixels covers.
  function largestIn(curve, from, to) {
    if (from >= end(curve) || !curve.ops.length) return null;
    const first = runAt(curve, from);
    const last = Math.max(first, runAt(curve, to - 1e-12 * longest()));
    // Runs that take no time begin where the first one does.
    let best = first;
    for (let i = first; i <= last; i++) if (curve.bytes[i] > curve.bytes[best]) best = i;
    return best;
  }

  function columns(curve) {
    const found = [];
    for (let x = margin.left; x < margin.left + plotWidth(); x++) {
      const best = largestIn(curve, toValue(x), toValue(x + 1));
      if (best !== null) found.push([x, best]);
    }
    return found;
  }

  function colour(name) { return getComputedStyle(root).getPropertyValue(`--${name}`).trim(); }

  function draw() {
    const { width, height } = size();
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `12px ${getComputedStyle(root).fontFamily}`;
    drawAxes(width, height);
    context.save();
    context.beginPath();
    context.rect(margin.left, 0, plotWidth(), height - margin.bottom + 8);
    context.clip();
    if (state.show === "both") visible().forEach(drawTotal);
    else drawCategories(active());
    visible().forEach(drawAgain);
    if (data.budget) {
      context.strokeStyle = colour("budget");
      context.setLineDash([7, 4]);
      context.lineWidth = 2;
      // On whole pixels, so that it is sharp.
      const y = Math.round(toY(data.budget));
      line(margin.left, y, margin.left + plotWidth(), y);
      context.setLineDash([]);
    }
    drawCursor();
    if (state.drag && state.drag.selecting) {
      context.fillStyle = colour("selection");
      const left = Math.min(state.drag.x, state.drag.at);
      context.fillRect(left, margin.top, Math.abs(state.drag.at - state.drag.x), height - margin.top - margin.bottom);
    }
    context.restore();
    canvas.dataset.from = String(state.from);
    canvas.dataset.to = String(state.to);
    canvas.dataset.step = state.step === null ? "" : String(state.step);
  }

  function line(x0, y0, x1, y1) {
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
  }

  function drawAxes(width, height) {
    context.fillStyle = colour("muted");
    context.strokeStyle = colour("grid");
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const [bytes, label] of format.byteTicks(highest, Math.max(3, Math.floor(height / 60)))) {
      line(margin.left, toY(bytes), width - margin.right, toY(bytes));
      context.fillText(label, margin.left - 6, toY(bytes));
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    const count = Math.max(2, Math.floor(plotWidth() / 110));
    const ticks = state.by === "time" ? format.timeTicks : format.countTicks;
    for (const [value, label] of ticks(state.from * longest(), state.to * longest(), count)) {
      const x = toX(value);
      line(x, height - margin.bottom, x, height - margin.bottom + 4);
      const half = context.measureText(label).width / 2;
      context.fillText(label, Math.min(Math.max(x, half), width - half), height - margin.bottom + 8);
    }
  }

  function drawTotal(curve) {
    const points = columns(curve);
    if (!points.length) return;
    context.beginPath();
    context.moveTo(points[0][0], toY(0));
    for (const [x, run] of points) { context.lineTo(x, toY(curve.bytes[run])); context.lineTo(x + 1, toY(curve.bytes[run])); }
    context.lineTo(points[points.length - 1][0] + 1, toY(0));
    context.closePath();
    context.globalAlpha = 0.22;
    context.fillStyle = colour(curve.colour);
    context.fill();
    context.globalAlpha = 1;
    context.strokeStyle = colour(curve.colour);
    context.lineWidth = 1.4;
    context.stroke();
  }

  function drawCategories(curve) {
    for (const [x, run] of columns(curve)) {
      let below = 0;
      data.categories.forEach((category, number) => {
        const bytes = at(curve.categories[number], run);
        if (!bytes) return;
        context.fillStyle = colour(category.colour);
        context.fillRect(x, toY(below + bytes), 1.05, toY(below) - toY(below + bytes));
        below += bytes;
      });
    }
  }
  // What never changes is stored once.
  const at = (values, run) => (Array.isArray(values) ? values[run] : values);

  // A mark under the axis for everything that runs again.
  function drawAgain(curve) {
    const y = size().height - margin.bottom;
    context.fillStyle = colour("again");
    for (let i = runAt(curve, toValue(margin.left)); i < curve.ops.length; i++) {
      const x = toX(starts(curve)[i]);
      if (x > margin.left + plotWidth()) break;
      if (curve.again[i]) context.fillRect(x, y + 1, Math.max(1, toX(starts(curve)[i + 1]) - x), 4);
    }
  }

  function drawCursor() {
    if (state.step === null) return;
    const curve = active();
    const x = (toX(starts(curve)[state.step]) + toX(starts(curve)[state.step + 1])) / 2;
    context.strokeStyle = colour("text");
    context.lineWidth = 1;
    line(x, margin.top, x, size().height - margin.bottom);
    context.fillStyle = colour("text");
    context.beginPath();
    context.arc(x, toY(curve.bytes[state.step]), 3.5, 0, 2 * Math.PI);
    context.fill();
  }

  function describe() {
    if (state.step === null) {
      readout.textContent = matchMedia("(pointer: coarse)").matches ? readout.dataset.touchHint : readout.dataset.hint;
      return;
    }
    const curve = active();
    const op = curve.ops[state.step];
    const kind = data.kinds[data.ops.kind[op]];
    const layer = data.layers[data.ops.layer[op]];
    const source = data.sources[data.ops.source[op]];
    const parts = [
      `${curve.label}, run ${(state.step + 1).toLocaleString("en")} of ${curve.ops.length.toLocaleString("en")}`,
      `${format.bytes(curve.bytes[state.step])}`,
      `${kind || "op"} ${data.ops.name[op]}`,
      layer ? `layer ${layer}` : "",
      source,
      data.timed ? format.time(data.ops.time[op]) : "",
      curve.again[state.step] ? `recomputation ${curve.again[state.step]}` : "",
    ];
    readout.textContent = parts.filter(Boolean).join(" · ");
  }

  function changed() {
    describe();
    requestAnimationFrame(draw);
  }

  function setView(from, to) {
    const least = Math.min(1, 4 / Math.max(...curves.map((curve) => curve.ops.length), 1) / 8);
    let width = Math.min(1, Math.max(least, to - from));
    state.from = Math.max(0, Math.min(1 - width, from));
    state.to = state.from + width;
    changed();
  }
  function zoom(factor, around = (state.from + state.to) / 2) {
    setView(around - (around - state.from) * factor, around + (state.to - around) * factor);
  }
  function select(step) {
    const curve = active();
    if (!curve.ops.length) return;
    state.step = Math.max(0, Math.min(curve.ops.length - 1, step));
    const middle = (starts(curve)[state.step] + starts(curve)[state.step + 1]) / 2 / longest();
    const width = state.to - state.from;
    if (middle < state.from || middle > state.to) setView(middle - width / 2, middle + width / 2);
    else changed();
  }
  function toPeak() {
    const curve = active();
    select(curve.peakStep);
    const middle = starts(curve)[curve.peakStep] / longest();
    setView(middle - 0.04, middle + 0.04);
  }
  function point(x) {
    const pick = visible().map((curve) => largestIn(curve, toValue(x), toValue(x + 1)));
    if (pick[Math.min(state.curve, pick.length - 1)] === null) state.curve = Math.max(0, pick.findIndex((run) => run !== null));
    const run = pick[Math.min(state.curve, pick.length - 1)];
    if (run !== undefined && run !== null) { state.step = run; changed(); }
  }

  // The pointer: hovering reads, a mouse drag selects what to zoom into, fingers pan and pinch.
  const fingers = new Map();
  const inside = (event) => event.clientX - canvas.getBoundingClientRect().left;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.focus({ preventScroll: true });
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, inside(event));
    state.drag = { x: inside(event), at: inside(event), from: state.from, to: state.to, selecting: false };
    point(inside(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    const x = inside(event);
    if (!state.drag) { point(x); return; }
    const before = fingers.get(event.pointerId);
    fingers.set(event.pointerId, x);
    if (fingers.size === 2) {
      const [a, b] = [...fingers.values()];
      const other = [...fingers.entries()].find(([id]) => id !== event.pointerId)[1];
      const apart = Math.abs(before - other), now = Math.abs(x - other);
      if (apart > 4 && now > 4) zoom(apart / now, toValue((a + b) / 2) / longest());
    } else if (event.pointerType === "touch") {
      const shift = ((state.drag.x - x) / plotWidth()) * (state.drag.to - state.drag.from);
      setView(state.drag.from + shift, state.drag.to + shift);
    } else {
      state.drag.at = x;
      state.drag.selecting = Math.abs(x - state.drag.x) > 4;
      changed();
    }
  });
  function released(event) {
    fingers.delete(event.pointerId);
    if (state.drag && state.drag.selecting) {
      const [left, right] = [state.drag.x, state.drag.at].sort((a, b) => a - b);
      const from = toValue(left) / longest(), to = toValue(right) / longest();
      state.drag = null;
      setView(from, to);
    }
    if (!fingers.size) state.drag = null;
    changed();
  }
  canvas.addEventListener("pointerup", released);
  canvas.addEventListener("pointercancel", released);
  canvas.addEventListener("dblclick", () => setView(0, 1));
  canvas.addEventListener("wheel", (event) => {
    // An unfocused chart lets the page scroll.
    if (document.activeElement !== canvas && !event.ctrlKey) return;
    event.preventDefault();
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 240))), toValue(inside(event)) / longest());
  }, { passive: false });

  const keys = {
    ArrowRight: (far) => select(state.step === null ? 0 : state.step + far),
    ArrowLeft: (far) => select(state.step === null ? 0 : state.step - far),
    ArrowUp: () => { state.curve = 0; select(state.step || 0); },
    ArrowDown: () => { state.curve = visible().length - 1; select(state.step || 0); },
    Home: () => select(0),
    End: () => select(active().ops.length - 1),
    "+": () => zoom(0.5, cursor()),
    "=": () => zoom(0.5, cursor()),
    "-": () => zoom(2, cursor()),
    0: () => setView(0, 1),
    p: toPeak,
    Escape: () => { state.step = null; setView(0, 1); },
  };
  function cursor() {
    if (state.step === null) return undefined;
    return Math.max(state.from, Math.min(state.to, starts(active())[state.step] / longest()));
  }
  canvas.addEventListener("keydown", (event) => {
    const action = keys[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action(event.shiftKey ? 25 : 1);
  });

  const actions = { in: () => zoom(0.5), out: () => zoom(2), all: () => setView(0, 1), peak: toPeak };
  root.querySelectorAll("button[data-action]").forEach((button) => {
    button.addEventListener("click", () => actions[button.dataset.action]());
  });
  root.querySelectorAll("select").forEach((chosen) => {
    chosen.addEventListener("change", () => {
      state[chosen.name] = chosen.value;
      state.step = null;
      root.querySelector(".legend-totals").hidden = state.show !== "both";
      root.querySelector(".legend-categories").hidden = state.show === "both";
      setView(0, 1);
    });
  });
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(canvas);
  changed();
  return { redraw: () => requestAnimationFrame(draw) };
}
