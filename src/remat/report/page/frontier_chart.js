// Extra time against budget as SVG: every point can be reached by pointer and keyboard.
"use strict";

function frontierChart(root, data, format) {
  const svg = root.querySelector("svg");
  const readout = root.querySelector(".readout");
  const points = data.frontier;
  const space = "http://www.w3.org/2000/svg";
  const margin = { left: 58, right: 16, top: 26, bottom: 46 };

  function element(name, attributes, text) {
    const made = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // Between two budgets the plan of the smaller one can be had, and the bound of the larger one holds (later = 1).
  function stairs(key, later) {
    const corner = (point, i) => (i ? [[later ? points[i - 1].budget : point.budget, later ? point[key] : points[i - 1][key]]] : []);
    return points.flatMap((point, i) => [...corner(point, i), [point.budget, point[key]]]);
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
      svg.append(element("text", { x: x(bytes), y: height - margin.bottom + 16, class: "tick middle" }, label));
    }
    svg.append(element("text", { x: margin.left, y: margin.top - 8, class: "tick" }, "extra time"));
    svg.append(element("text", { x: width - margin.right, y: height - 6, class: "tick end" }, "budget"));
    if (points.length) {
      const [found, bound] = [stairs("overhead", 0), stairs("bound", 1)].map((steps) => steps.map(([b, s]) => `${x(b)},${y(s)}`));
      svg.append(element("path", { d: `M${[...found, ...[...bound].reverse()].join("L")}Z`, class: "gap" }));
      svg.append(element("path", { d: `M${bound.join("L")}`, class: "bound" }));
      svg.append(element("path", { d: `M${found.join("L")}`, class: "found" }));
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
