// Ties the page together: units, colour scheme, sortable tables.
"use strict";

const format = (() => {
  const units = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
  const times = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
  const trimmed = (value, digits) => String(Number(value.toFixed(digits)));
  const of = (table, value) => table.find(([, scale]) => Math.abs(value) >= scale) || table[table.length - 1];
  // Steps of 1, 2 or 5 times a power of ten.
  function ticks(from, to, count) {
    const rough = (to - from) / count || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || rough;
    const found = [];
    for (let value = Math.ceil(from / step) * step; value <= to * (1 + 1e-9); value += step) found.push(value);
    return { found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
  }
  function scaled(table, from, to, count) {
    const [unit, scale] = of(table, to);
    const { found, digits } = ticks(from / scale, to / scale, count);
    return found.map((value) => [value * scale, `${value.toFixed(digits)} ${unit}`]);
  }
  return {
    bytes: (value) => { const [unit, scale] = of(units, value); return `${trimmed(value / scale, 2)} ${unit}`; },
    time: (value) => { const [unit, scale] = of(times, value); return `${trimmed(value / scale, 2)} ${unit}`; },
    share: (value) => `${(value * 100).toFixed(2)} %`,
    byteTicks: (most, count) => scaled(units, 0, most, count),
    timeTicks: (from, to, count) => scaled(times, from, to, count),
    countTicks: (from, to, count) => ticks(from, to, count).found.map((value) => [value, Math.round(value).toLocaleString("en")]),
    shareTicks: (most, count) => {
      const { found, digits } = ticks(0, most * 100, count);
      return found.map((value) => [value / 100, `${value.toFixed(digits)} %`]);
    },
  };
})();

function sortable(table) {
  const body = table.tBodies[0];
  table.querySelectorAll("th button").forEach((button) => {
    button.addEventListener("click", () => {
      const column = button.closest("th").cellIndex;
      const descending = button.closest("th").getAttribute("aria-sort") !== "descending";
      table.querySelectorAll("th").forEach((th) => th.removeAttribute("aria-sort"));
      button.closest("th").setAttribute("aria-sort", descending ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        const order = x !== "" && y !== "" && !isNaN(x) && !isNaN(y) ? x - y : x.localeCompare(y);
        return descending ? -order : order;
      });
      body.append(...rows);
    });
  });
}

function expandable(section) {
  const button = section.querySelector("button.more");
  if (!button) return;
  button.addEventListener("click", () => {
    const all = section.classList.toggle("all");
    button.setAttribute("aria-expanded", String(all));
    button.textContent = all ? button.dataset.less : button.dataset.more;
  });
}

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = [memoryChart(document.getElementById("memory"), data, format)];
  const frontier = document.getElementById("frontier");
  if (frontier) charts.push(frontierChart(frontier, data, format));
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll("section").forEach(expandable);
  const redraw = () => charts.forEach((chart) => chart.redraw());
  const scheme = document.getElementById("scheme");
  scheme.addEventListener("change", () => {
    document.documentElement.dataset.scheme = scheme.value;
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
})();
