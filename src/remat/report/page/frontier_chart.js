// Extra time against budget as SVG: every point can be reached by pointer and keyboard.
"use strict";

function frontierChart(root, data, format) {
  const svg = root.querySelector("svg");
  const readout = root.querySelector(".readout");
  const points = data.frontier;
  const space = "http://www.w3.org/2000/svg";
  const margin = { left: 58, right: 16, top: 14, bottom: 34 };

  function element(name, attributes, text) {
    const made = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function draw() {
    const width = Math.max(260, svg.getBoundingClientRect().width);
    const height = Math.max(200, svg.getBoundingClientRect().height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    const all = data.chosen ? [...points, data.chosen] : points;
    const right = Math.max(...all.map((point) => point.budget)) * 1.04;
    const top = Math.max(0.01, ...all.map((point) => point.overhead)) * 1.12;
    const x = (bytes) => margin.left + (bytes / right) * (width - margin.left - margin.right);
    const y = (share) => height - margin.bottom - (share / top) * (height - margin.top - margin.bottom);

    for (const [share, label] of format.shareTicks(top, 5)) {
      svg.append(element("line", { x1: margin.left, x2: width - margin.right, y1: y(share), y2: y(share), class: "grid" }));
      svg.append(element("text", { x: margin.left - 6, y: y(share), class: "tick end" }, label));
    }
    for (const [bytes, label] of format.byteTicks(right, Math.max(2, Math.floor(width / 120)))) {
      svg.append(element("text", { x: x(bytes), y: height - margin.bottom + 18, class: "tick middle" }, label));
    }
    const path = (key) => points.map((point, i) => `${i ? "L" : "M"}${x(point.budget)},${y(point[key])}`).join("");
    if (points.length) {
      const back = [...points].reverse().map((point) => `L${x(point.budget)},${y(point.bound)}`).join("");
      svg.append(element("path", { d: `${path("overhead")}${back}Z`, class: "gap" }));
      svg.append(element("path", { d: path("bound"), class: "bound" }));
      svg.append(element("path", { d: path("overhead"), class: "found" }));
    }
    all.forEach((point) => {
      const chosen = point === data.chosen;
      const words =
        `${chosen ? "This plan: budget" : "Budget"} ${format.bytes(point.budget)}: ${format.share(point.overhead)} more ` +
        `time, proved at least ${format.share(point.bound)}, predicted peak ${format.bytes(point.peak)}`;
      const dot = element("circle", {
        cx: x(point.budget), cy: y(point.overhead), r: chosen ? 8 : 5, tabindex: 0, role: "img",
        class: chosen ? "point chosen" : "point", "aria-label": words,
      });
      dot.append(element("title", {}, words));
      for (const event of ["focus", "pointerenter", "click"]) dot.addEventListener(event, () => { readout.textContent = words; });
      svg.append(dot);
    });
  }
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(svg);
  draw();
  return { redraw: draw };
}
