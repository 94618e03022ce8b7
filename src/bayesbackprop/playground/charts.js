// Drawing by hand: elements of SVG in units of pixels, so that text has its size on every screen.
const SVG = "http://www.w3.org/2000/svg";
const byId = id => document.getElementById(id);

function draw(parent, kind, attributes, text) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function number(value) {
  const size = Math.abs(value);
  if (size >= 10000) return value.toLocaleString("en", {notation: "compact", maximumFractionDigits: 1});
  return +value.toPrecision(size >= 1000 ? 4 : 3) + "";
}

// Round numbers within [low, high], about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(factor => factor * power >= raw) * power, found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
  return found;
}

// An empty picture of an element's own size, with the places of numbers in it.
function frame(svg, range, margin) {
  const width = svg.clientWidth, height = svg.clientHeight;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const [x0, x1, y0, y1] = range, [top, right, bottom, left] = margin;
  return {svg, width, height, range, margin,
    x: value => left + (width - left - right) * (value - x0) / (x1 - x0),
    y: value => height - bottom - (height - top - bottom) * (value - y0) / (y1 - y0),
    atX: place => x0 + (place - left) / (width - left - right) * (x1 - x0),
    atY: place => y0 + (height - bottom - place) / (height - top - bottom) * (y1 - y0)};
}

function axes(f, xLabel = number) {
  const [x0, x1, y0, y1] = f.range, [top, right, bottom, left] = f.margin;
  for (const y of ticks(y0, y1, Math.max(2, (f.height - top - bottom) / 55))) {
    draw(f.svg, "line", {x1: left, x2: f.width - right, y1: f.y(y), y2: f.y(y), class: "grid"});
    draw(f.svg, "text", {x: left - 6, y: f.y(y) + 4, "text-anchor": "end"}, number(y));
  }
  for (const x of ticks(x0, x1, Math.max(2, (f.width - left - right) / 90)))
    draw(f.svg, "text", {x: f.x(x), y: f.height - bottom + 16, "text-anchor": "middle"}, xLabel(x));
}

const path = (f, xs, ys) => xs.map((x, i) => (i ? "L" : "M") + f.x(x).toFixed(1) + " " + f.y(ys[i]).toFixed(1)).join("");

function curve(f, xs, ys, kind) {
  return draw(f.svg, "path", {d: path(f, xs, ys), class: "curve " + kind});
}

function area(f, xs, lows, highs, kind) {
  const back = [...xs].reverse().map((x, i) => `L${f.x(x).toFixed(1)} ${f.y(lows[xs.length - 1 - i]).toFixed(1)}`);
  return draw(f.svg, "path", {d: path(f, xs, highs) + back.join("") + "Z", class: kind});
}

// A line chart whose heights fit most of what is shown: the first steps of a run may be far above all others.
function lines(svg, xs, columns, kinds, low = Infinity) {
  const late = columns.flatMap(column => column.slice(Math.floor(column.length * .15)));
  let least = Math.min(low, ...late), most = Math.max(...late);
  if (!(most - least > 1e-9)) { least -= 1; most += 1; }
  const space = (most - least) * .05;
  const f = frame(svg, [0, Math.max(1, xs.at(-1) ?? 1), least - (low === least ? 0 : space), most + space], [6, 10, 22, 48]);
  axes(f);
  const ceiling = value => Math.min(value, most + 2 * space);
  columns.forEach((column, i) => curve(f, xs, column.map(ceiling), kinds[i]));
  return f;
}

function bars(svg, edges, counts, kind) {
  const f = frame(svg, [edges[0], edges.at(-1), 0, Math.max(1, ...counts) * 1.05], [6, 10, 22, 48]);
  axes(f);
  counts.forEach((count, i) => draw(svg, "rect", {x: f.x(edges[i]) + .5, width: Math.max(1, f.x(edges[i + 1]) - f.x(edges[i]) - 1),
    y: f.y(count), height: Math.max(0, f.y(0) - f.y(count)), class: "bar " + kind}));
  draw(svg, "line", {x1: f.x(0), x2: f.x(0), y1: f.y(0), y2: 6, class: "grid s-ink"});
  return f;
}

// A point of a class: each has a colour and a shape of its own.
function mark(f, x, y, label) {
  const px = f.x(x), py = f.y(y), kind = "dot f-" + ["one", "two", "three"][label];
  if (label === 0) draw(f.svg, "circle", {cx: px, cy: py, r: 5.5, class: kind});
  else if (label === 1) draw(f.svg, "rect", {x: px - 5, y: py - 5, width: 10, height: 10, class: kind});
  else draw(f.svg, "path", {d: `M${px} ${py - 6.5}l6.2 11h-12.4z`, class: kind});
}

// The borders between classes, by the class at each place and its lead over the second. In each cell of the grid they cross
// those edges whose ends differ, where both leads would be 0, and meet in the middle of where they cross.
function borders(f, size, classes, leads) {
  const [x0, x1, y0, y1] = f.range, wide = (x1 - x0) / (size - 1), high = (y1 - y0) / (size - 1);
  const place = (x, y) => `${f.x(x0 + x * wide).toFixed(1)} ${f.y(y0 + y * high).toFixed(1)}`;
  let d = "";
  for (let row = 0; row + 1 < size; row++) for (let column = 0; column + 1 < size; column++) {
    const corners = [[0, 0], [1, 0], [1, 1], [0, 1]], found = [];
    corners.forEach(([ax, ay], i) => {
      const [bx, by] = corners[(i + 1) % 4], a = (row + ay) * size + column + ax, b = (row + by) * size + column + bx;
      if (classes[a] === classes[b]) return;
      const part = (leads[a] + .5) / (leads[a] + leads[b] + 1);
      found.push([column + ax + part * (bx - ax), row + ay + part * (by - ay)]);
    });
    const middle = found.reduce(([x, y], each) => [x + each[0] / found.length, y + each[1] / found.length], [0, 0]);
    if (found.length === 2) d += `M${place(...found[0])}L${place(...found[1])}`;
    else for (const each of found) d += `M${place(...each)}L${place(...middle)}`;
  }
  return draw(f.svg, "path", {d, class: "curve thin s-ink"});
}

function colour(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16));
}

// The map of classes as a small image, which the browser makes larger.
function heat(canvas, map, shown) {
  const size = map.size, context = canvas.getContext("2d"), classes = map.probabilities.length;
  canvas.width = canvas.height = size;
  const image = context.createImageData(size, size), paper = colour("--paper"), fog = colour("--fog");
  const inks = ["--one", "--two", "--three"].map(colour);
  for (let row = 0; row < size; row++) for (let column = 0; column < size; column++) {
    const at = row * size + column, to = 4 * ((size - 1 - row) * size + column);
    let ink = fog, strength = .9 * map.epistemic[at] / 255;
    if (shown === "probability") {
      const p = map.probabilities.map(each => each[at] / 255), most = Math.max(...p);
      ink = [0, 1, 2].map(c => p.reduce((sum, each, k) => sum + each * inks[k][c], 0));
      strength = .12 + .5 * (most - 1 / classes) / (1 - 1 / classes);
    }
    for (let c = 0; c < 3; c++) image.data[to + c] = paper[c] + strength * (ink[c] - paper[c]);
    image.data[to + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}
