// Line charts as SVG, with a text alternative and a table of the same numbers.

export const MOST_POINTS = 400;
const WIDTH = 560, HEIGHT = 220, LEFT = 56, RIGHT = 12, TOP = 12, BOTTOM = 34;
const SVG = "http://www.w3.org/2000/svg";

// Creates an element. Strings become text nodes, so nothing is ever parsed as HTML.
export function h(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

function s(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function short(number) {
  if (number === null || number === undefined) return "–";
  if (Number.isInteger(number) && Math.abs(number) < 1e6) return number.toLocaleString("en");
  if (number !== 0 && (Math.abs(number) >= 1e6 || Math.abs(number) < 1e-3)) return number.toExponential(2);
  return String(Number(number.toPrecision(4)));
}

// At most MOST_POINTS points: of each group of neighbours the lowest and the highest, so that peaks stay.
export function thinned(points) {
  if (points.length <= MOST_POINTS) return points;
  const size = Math.ceil((2 * points.length) / MOST_POINTS);
  const kept = [];
  for (let start = 0; start < points.length; start += size) {
    const group = points.slice(start, start + size);
    const low = group.reduce((a, b) => (b.y < a.y ? b : a));
    const high = group.reduce((a, b) => (b.y > a.y ? b : a));
    kept.push(...(low === high ? [low] : low.x < high.x ? [low, high] : [high, low]));
  }
  return kept;
}

// Round steps that cover low to high: 1, 2 or 5 times a power of ten.
export function ticks(low, high, count, whole) {
  const rough = Math.max(high - low, Number.MIN_VALUE) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) found.push(Number(tick.toPrecision(12)));
  return found;
}

// points: [{x, y}] in order of x. limit: {value, label}, a dashed line.
export function lineChart({ title, xName, yName, points, limit = null, fromZero = false, wholeX = true, empty }) {
  const panel = h("section", { class: "panel" }, h("h3", {}, title));
  const shown = thinned(points.filter((point) => Number.isFinite(point.y)));
  if (shown.length === 0) return build(panel, {}, [h("p", { class: "quiet" }, empty)]);
  const scale = scales(shown, limit, fromZero);
  const last = shown[shown.length - 1];
  const summary = `${title}: ${yName} is ${short(last.y)} at ${xName} ${short(last.x)}; lowest ${short(Math.min(...shown.map((p) => p.y)))}, highest ${short(Math.max(...shown.map((p) => p.y)))}.`;
  const drawing = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": summary });
  drawing.append(...axes(scale, xName, yName, wholeX));
  if (limit) {
    const y = scale.y(limit.value);
    drawing.append(s("line", { class: "limit", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
    drawing.append(s("text", { x: WIDTH - RIGHT, y: y - 4, "text-anchor": "end" }, limit.label));
  }
  const path = shown.map((point, index) => `${index ? "L" : "M"}${scale.x(point.x).toFixed(1)} ${scale.y(point.y).toFixed(1)}`);
  drawing.append(s("path", { class: "line", d: path.join("") }));
  if (shown.length < 40) drawing.append(...shown.map((p) => s("circle", { class: "dot", cx: scale.x(p.x), cy: scale.y(p.y), r: 2.5 })));
  return build(panel, {}, [drawing, numbers(title, xName, yName, points)]);
}

function scales(points, limit, fromZero) {
  const ys = points.map((point) => point.y).concat(limit ? [limit.value] : []);
  let low = fromZero ? Math.min(0, ...ys) : Math.min(...ys), high = Math.max(...ys);
  if (low === high) [low, high] = fromZero || low === 0 ? [low, low + 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
  const margin = (high - low) * 0.06;
  if (!fromZero) low -= margin;
  high += margin;
  const first = points[0].x, last = Math.max(points[points.length - 1].x, first + 1e-9);
  return {
    first, last, low, high,
    x: (value) => LEFT + ((value - first) / (last - first)) * (WIDTH - LEFT - RIGHT),
    y: (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM),
  };
}

function axes(scale, xName, yName, wholeX) {
  const floor = HEIGHT - BOTTOM, parts = [];
  for (const tick of ticks(scale.low, scale.high, 4, false)) {
    const y = scale.y(tick);
    parts.push(s("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
    parts.push(s("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, short(tick)));
  }
  for (const tick of ticks(scale.first, scale.last, 6, wholeX)) parts.push(s("text", { x: scale.x(tick), y: floor + 15, "text-anchor": "middle" }, short(tick)));
  parts.push(s("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, xName));
  parts.push(s("text", { x: 12, y: HEIGHT / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${HEIGHT / 2})` }, yName));
  return parts;
}

function numbers(title, xName, yName, points) {
  const rows = points.slice(-20).reverse();
  return h("details", {}, h("summary", {}, "Numbers"), table(
    `${title}: the newest ${rows.length} of ${points.length}`,
    [{ name: xName, number: true }, { name: yName, number: true }],
    rows.map((point) => [short(point.x), short(point.y)]),
  ));
}

// columns: [{name, number}]. rows: arrays of text or elements.
export function table(caption, columns, rows) {
  const kind = (index) => (columns[index].number ? "number" : null);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, columns.map((column, index) => h("th", { scope: "col", class: kind(index) }, column.name)))),
      h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, index) => index === 0
        ? h("th", { scope: "row", class: kind(index) }, cell)
        : h("td", { class: kind(index) }, cell)))))));
}
