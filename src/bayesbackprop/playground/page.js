// The page owns points and settings; the server trains whatever it was put last, and is asked for snapshots.
const END = 3, MOST = 300, POLL = 200, PATIENCE = 150;
const name = [...crypto.getRandomValues(new Uint8Array(16))].map(byte => byte.toString(16).padStart(2, "0")).join("");
const address = "sessions/" + name;

const network = () => ({prior: "normal", prior_scale: 1, noise: .1, family: "conditional", estimator: "auto", temperature: 1,
  sigma: .05, width: 32, layers: 2, activation: "silu", seed: 0});
const tasks = {
  regression: {points: [], past: [], settings: network()},
  classification: {points: [], past: [], settings: network()},
  bandit: {settings: {world: "crossing", epsilon: .1, exploration: 1, seed: 0}},
};
let tab = "regression", pace = null, seen = 0, newest = null, cross = [0, 0], shownMap = "probability", paintClass = 0;
const task = () => tasks[tab];

// --- examples: the same points each time, by a generator of their own ------------------------------------------------
function random(seed) {
  let state = seed;
  const uniform = () => { state = (Math.imul(state, 1664525) + 1013904223) >>> 0; return (state + .5) / 2 ** 32; };
  return {uniform, normal: () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform())};
}
const many = (count, make) => Array.from({length: count}, (_, i) => make(i).map(value => Math.round(value * 1000) / 1000));
const presets = {
  regression: {
    Gap: r => many(24, i => { const x = i % 2 ? .8 + 1.4 * r.uniform() : -2.2 + 1.4 * r.uniform();
      return [x, Math.sin(2 * x) + .1 * r.normal()]; }),
    Sine: r => many(40, () => { const x = -2.4 + 4.8 * r.uniform(); return [x, 1.3 * Math.sin(2.2 * x) + .1 * r.normal()]; }),
    Step: r => many(30, () => { const x = -2.2 + 4.4 * r.uniform(); return [x, (x > 0 ? 1 : -1) + .1 * r.normal()]; }),
  },
  classification: {
    Moons: r => many(60, i => { const t = Math.PI * r.uniform(), side = i % 2;
      return [1.2 * (side ? 1 - Math.cos(t) : Math.cos(t)) - .6 + .12 * r.normal(),
        1.2 * (side ? .4 - Math.sin(t) : Math.sin(t)) - .2 + .12 * r.normal(), side]; }),
    Blobs: r => many(48, i => { const k = i % 3, at = 2 * Math.PI * k / 3 + .5;
      return [1.3 * Math.cos(at) + .3 * r.normal(), 1.3 * Math.sin(at) + .3 * r.normal(), k]; }),
    Ring: r => many(60, i => { const t = 2 * Math.PI * r.uniform(), far = i % 2 ? 1.7 + .12 * r.normal() : .5 * Math.sqrt(r.uniform());
      return [far * Math.cos(t), far * Math.sin(t), i % 2]; }),
  },
};

// --- the server ------------------------------------------------------------------------------------------------------
let timer = 0, putting = Promise.resolve(), isPut = false;
function change(wait = 0) {
  clearTimeout(timer);
  timer = setTimeout(() => { putting = putting.then(put); }, wait);
}

async function put() {
  const {points, settings} = task();
  const work = tab === "bandit" ? {task: tab, pace, ...settings} : {task: tab, pace, points, settings};
  try {
    const answer = await fetch(address, {method: "PUT", headers: {"Content-Type": "application/json"}, body: JSON.stringify(work)});
    const content = await answer.json();
    complain(answer.ok ? "" : content.message);
    isPut ||= answer.ok;
  } catch (error) {
    complain("The playground does not answer. Is bbb playground still running?");
  }
}

async function poll() {
  try {
    const answer = await fetch(`${address}?after=${seen}`, {cache: "no-store"});
    if (answer.status === 404) { seen = 0; await put(); }
    if (answer.status !== 200) return;
    const snapshot = await answer.json();
    seen = snapshot.version;
    if (snapshot.task !== tab) return;
    if (snapshot.status === "failed") complain(snapshot.message);
    newest = snapshot.status === "failed" ? {...newest, status: "failed", step: snapshot.step} : snapshot;
    show();
  } catch (error) {
    complain("The playground does not answer. Is bbb playground still running?");
  }
}

function complain(message) {
  const problem = byId("problem");
  if (problem.textContent !== message) problem.textContent = message;
  problem.hidden = !message;
}

const say = text => { byId("said").textContent = text; };

// --- pictures --------------------------------------------------------------------------------------------------------
const SENTENCES = {
  regression: "Half of all new points should fall into the dark band, and 95 % into the light one. Thin lines are functions drawn from the posterior: where they part, the network does not know.",
  classification: {
    probability: "The colour is the most probable class, paler where it is less certain. Thin lines are the borders that networks drawn from the posterior see: where they part, the network does not know.",
    epistemic: "The darker, the more the networks drawn from the posterior disagree: here another point would teach most.",
  },
  bandit: "Each curve is what an agent expects of an action in a context, with two standard deviations of its belief; the dashed curves are the truth. Thompson sampling tries what may still be best, epsilon-greedy anything, now and then.",
};
const KEYS = {
  regression: '<i class="total"></i>median<i class="band b50"></i>50 %<i class="band b95"></i>95 %<i class="one"></i>below: from not knowing the weights<i class="two"></i>from noise',
  classification: "",
  bandit: '<i class="one"></i>action 1<i class="two"></i>action 2<i class="three"></i>action 3<i class="dashed"></i>truth',
};

// Shown under the band: how much of the standard deviation each part of the variance makes.
const STRIP = 64;

function showBand(band) {
  const svg = byId("picture"), f = frame(svg, [-END, END, -END, END], [6, 0, STRIP + 30, 0]);
  for (const y of [-2, -1, 0, 1, 2]) {
    draw(svg, "line", {x1: 0, x2: f.width, y1: f.y(y), y2: f.y(y), class: "grid"});
    draw(svg, "text", {x: 6, y: f.y(y) - 4}, y);
  }
  if (band) {
    const [q0, q1, q2, q3, q4] = band.quantiles;
    const within = draw(svg, "svg", {x: 0, y: 0, width: f.width, height: f.y(-END)}), inner = {...f, svg: within};
    area(inner, band.x, q0, q4, "f-one b95").id = "band95";
    area(inner, band.x, q1, q3, "f-one b50").id = "band50";
    for (const each of band.functions) curve(inner, band.x, each, "thin s-ink drawn");
    curve(inner, band.x, q2, "s-ink").id = "median";
    strip(f, band);
  }
  for (const [x, y] of task().points) draw(svg, "circle", {cx: f.x(x), cy: f.y(y), r: 5, class: "dot f-two"});
  return f;
}

function strip(f, band) {
  const top = f.height - STRIP - 22, all = band.x.map((_, i) => Math.hypot(band.epistemic[i], band.aleatoric[i]));
  const most = Math.max(.5, ...all), s = {...f, y: value => top + STRIP - (STRIP - 8) * value / most}, zero = all.map(() => 0);
  // The parts add up as variances do: the noise has its share of the whole at each place.
  const noise = all.map((whole, i) => band.aleatoric[i] ** 2 / (whole || 1));
  draw(f.svg, "line", {x1: 0, x2: f.width, y1: top + STRIP, y2: top + STRIP, class: "grid"});
  area(s, band.x, noise, all, "f-one b50").id = "epistemic";
  area(s, band.x, zero, noise, "f-two b50").id = "aleatoric";
  draw(f.svg, "text", {x: 6, y: top + 10}, `standard deviation (up to ${number(most)})`);
  for (const x of [-2, -1, 0, 1, 2]) draw(f.svg, "text", {x: f.x(x), y: f.height - 6, "text-anchor": "middle"}, x);
}

function showMap(map) {
  const svg = byId("picture"), f = frame(svg, [-END, END, -END, END], [0, 0, 0, 0]);
  if (map) {
    heat(byId("heat"), map, shownMap);
    if (shownMap === "probability") map.classes.forEach((each, i) => borders(f, map.size, each, map.leads[i]).classList.add("drawn"));
  }
  for (const [x, y, label] of task().points) mark(f, x, y, label);
  return f;
}

let frameNow = null;
function showPoints() {
  const picture = newest?.trained?.picture, svg = byId("picture");
  byId("heat").hidden = tab !== "classification" || picture?.kind !== "map";
  frameNow = tab === "regression" ? showBand(picture?.kind === "band" ? picture : null) : showMap(picture?.kind === "map" ? picture : null);
  const px = frameNow.x(cross[0]), py = frameNow.y(cross[1]);
  draw(svg, "path", {d: `M${px - 12} ${py}h9m6 0h9M${px} ${py - 12}v9m0 6v9`, class: "cross"});
  const count = task().points.length;
  svg.setAttribute("aria-label", `${tab === "regression" ? "Prediction with its uncertainty" : "Map of the classes"}, ${count} points`);
  byId("undo").disabled = !task().past.length;
  byId("clear").disabled = !count;
}

function showPlayed(played) {
  const kinds = ["one", "two", "three"];
  played.players.forEach((player, i) => {
    byId("name-" + i).textContent = {ThompsonSampling: "Thompson sampling", EpsilonGreedy: "Epsilon-greedy"}[player.name] ?? player.name;
    const f = frame(byId("player-" + i), [-1, 1, 0, 1], [6, 10, 22, 34]);
    axes(f);
    const clipped = value => Math.min(1, Math.max(0, value));
    player.means.forEach((means, k) => {
      area(f, played.contexts, means.map((m, j) => clipped(m - 2 * player.spreads[k][j])), means.map((m, j) => clipped(m + 2 * player.spreads[k][j])), `f-${kinds[k]} b95`);
      curve(f, played.contexts, means.map(clipped), "s-" + kinds[k]);
      curve(f, played.contexts, played.truth[k], "dashed s-" + kinds[k]);
    });
    byId("player-" + i).setAttribute("aria-label", `${player.name}: expected rewards of three actions by context`);
  });
  const [one, two] = played.players, last = played.steps.length ? [one.regret.at(-1), two.regret.at(-1)] : [0, 0];
  lines(byId("regret"), [0, ...played.steps], [[0, ...one.regret], [0, ...two.regret]], ["s-one", "s-two"], 0);
  byId("regret").setAttribute("aria-label", `Regret: Thompson sampling ${number(last[0])}, epsilon-greedy ${number(last[1])}`);
  const svg = byId("taken"), f = frame(svg, [0, 3, 0, 1.05 * Math.max(1, ...one.chosen, ...two.chosen)], [6, 10, 22, 48]);
  axes(f, x => "");
  [one, two].forEach((player, i) => player.chosen.forEach((count, k) => draw(svg, "rect", {x: f.x(k + .2 + .3 * i), width: f.x(.28) - f.x(0),
    y: f.y(count), height: f.y(0) - f.y(count), class: "bar f-" + kinds[i]})));
  for (let k = 0; k < 3; k++) draw(svg, "text", {x: f.x(k + .5), y: f.height - 6, "text-anchor": "middle"}, `action ${k + 1}`);
  svg.setAttribute("aria-label", `Actions taken: Thompson sampling ${one.chosen.join(", ")}; epsilon-greedy ${two.chosen.join(", ")}`);
}

function show() {
  if (tab !== "bandit") showPoints();
  if (!newest) return;
  const {trained, played, step, rate, status} = newest;
  const doing = status === "failed" ? "failed" : pace === 0 ? "paused" : status === "settled" ? "settled" : `${number(rate)} steps/s`;
  byId("status").textContent = `step ${step.toLocaleString("en")} · ${doing}` + (trained ? ` · ${trained.weights.toLocaleString("en")} weights` : "");
  if (trained) {
    const {step: steps, likelihood, complexity} = trained.costs, total = likelihood.map((each, i) => each + complexity[i]);
    if (steps.length) lines(byId("energy"), steps, [likelihood, complexity, total], ["s-one", "s-two", "s-ink"]);
    byId("energy").setAttribute("aria-label", steps.length ? `Free energy ${number(total.at(-1))} nats: likelihood cost ${number(likelihood.at(-1))}, complexity cost ${number(complexity.at(-1))}` : "Free energy");
    bars(byId("snr"), trained.snr.edges, trained.snr.counts, "f-three");
    byId("snr").setAttribute("aria-label", "Histogram of the signal-to-noise ratios of the weights");
  }
  if (played) showPlayed(played);
  document.body.dataset.step = step;
  document.body.dataset.status = status;
}

// --- points ----------------------------------------------------------------------------------------------------------
function setPoints(points, said) {
  const own = task();
  own.past.push(own.points);
  own.past.splice(0, own.past.length - 100);
  own.points = points;
  showPoints();
  change(PATIENCE);
  if (said) say(`${said}. ${points.length} points.`);
}

const short = value => Math.round(value * 1000) / 1000;

// A click or Enter: a point goes where there is one already, and comes where there is none.
function touch(x, y) {
  x = short(Math.min(END, Math.max(-END, x))); y = short(Math.min(END, Math.max(-END, y)));
  const points = task().points, near = points.findIndex(point => Math.hypot(frameNow.x(point[0]) - frameNow.x(x), frameNow.y(point[1]) - frameNow.y(y)) < 9);
  if (near >= 0) return setPoints(points.toSpliced(near, 1), "Removed");
  if (points.length >= MOST) return complain(`At most ${MOST} points.`);
  setPoints([...points, tab === "regression" ? [x, y] : [x, y, paintClass]], `Added at ${number(x)}, ${number(y)}`);
}

const picture = byId("picture");
const placeOf = event => {
  const box = picture.getBoundingClientRect();
  return [frameNow.atX(event.clientX - box.left), frameNow.atY(event.clientY - box.top)];
};
let painted = null;
picture.addEventListener("pointerdown", event => {
  if (event.pointerType === "mouse" && event.button === 0) painted = [event.clientX, event.clientY, false];
});
picture.addEventListener("pointermove", event => {  // a mouse that is held down paints
  if (!painted || !(event.buttons & 1) || Math.hypot(event.clientX - painted[0], event.clientY - painted[1]) < 18) return;
  painted = [event.clientX, event.clientY, true];
  const [x, y] = placeOf(event);
  if (Math.abs(x) <= END && Math.abs(y) <= END) touch(x, y);
});
picture.addEventListener("click", event => {
  const dragged = painted?.[2];
  painted = null;
  if (dragged) return;
  const [x, y] = placeOf(event);
  if (y < -END) return;  // on the strip below
  cross = [short(x), short(y)];
  touch(x, y);
});
picture.addEventListener("keydown", event => {
  const step = event.shiftKey ? .5 : .1, moves = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1]};
  if (event.key in moves) {
    cross = cross.map((value, i) => short(Math.min(END, Math.max(-END, value + step * moves[event.key][i]))));
    say(`${number(cross[0])}, ${number(cross[1])}`);
    showPoints();
  } else if (event.key === "Enter" || event.key === " ") touch(...cross);
  else if (event.key === "Backspace" || event.key === "Delete") undo();
  else if (tab === "classification" && "123".includes(event.key)) byId("show").querySelectorAll("[name=class]")[+event.key - 1].click();
  else return;
  event.preventDefault();
});

function undo() {
  const own = task();
  if (!own.past.length) return;
  own.points = own.past.pop();
  showPoints();
  change(PATIENCE);
  say(`Undone. ${own.points.length} points.`);
}
byId("undo").addEventListener("click", undo);
byId("clear").addEventListener("click", () => setPoints([], "Cleared"));
for (const button of document.querySelectorAll(".restart")) button.addEventListener("click", () => {
  task().settings.seed = (task().settings.seed + 1) % 2 ** 31;
  change();
  say("Restarted.");
});

// --- settings --------------------------------------------------------------------------------------------------------
const controls = byId("controls");
controls.addEventListener("submit", event => event.preventDefault());
for (const control of controls.querySelectorAll("[data-setting]")) {
  control.addEventListener("input", () => {
    const settings = task().settings, setting = control.dataset.setting;
    const value = control.type === "range" ? +control.value : control.value;
    settings[setting] = "log" in control.dataset ? +(10 ** value).toPrecision(3) : value;
    // Conditional is for Normal priors, and weights that vary together have one estimator: follow the last choice.
    if (setting === "family" && settings.family === "conditional") settings.prior = "normal";
    if (setting === "prior" && settings.prior !== "normal" && settings.family === "conditional") settings.family = "diagonal";
    if (setting === "family" && settings.family === "full") settings.width = Math.min(settings.width, 16), settings.layers = Math.min(settings.layers, 2);
    if (settings.family !== "diagonal" && "estimator" in settings) settings.estimator = "auto";
    fillControls();
    change(PATIENCE);
  });
}
function fillControls() {
  const settings = task().settings;
  for (const control of controls.querySelectorAll("[data-setting]")) {
    const value = settings[control.dataset.setting];
    if (value === undefined) continue;
    if (document.activeElement !== control || control.type !== "range") control.value = "log" in control.dataset ? Math.log10(value) : value;
    const output = control.parentElement.querySelector(".value");
    if (output) output.textContent = number(value);
    if (control.dataset.setting === "estimator") control.disabled = settings.family !== "diagonal";
  }
}
for (const radio of document.querySelectorAll("[name=pace]")) radio.addEventListener("change", () => {
  pace = radio.value === "" ? null : +radio.value;
  change();
  show();
});
for (const radio of document.querySelectorAll("[name=map]")) radio.addEventListener("change", () => {
  shownMap = radio.value;
  byId("sentence").textContent = SENTENCES.classification[shownMap];
  show();
});
for (const radio of document.querySelectorAll("[name=class]")) radio.addEventListener("change", () => { paintClass = +radio.value; });

// --- tabs ------------------------------------------------------------------------------------------------------------
const tabs = [...document.querySelectorAll("[role=tab]")];
function select(which) {
  tab = which;
  document.body.dataset.tab = tab;
  newest = null;
  for (const button of tabs) {
    button.setAttribute("aria-selected", button.dataset.tab === tab);
    button.tabIndex = button.dataset.tab === tab ? 0 : -1;
  }
  byId("main").setAttribute("aria-labelledby", "tab-" + tab);
  const sentence = SENTENCES[tab];
  byId("sentence").textContent = sentence[shownMap] ?? sentence;
  byId("key").innerHTML = KEYS[tab];
  byId("presets").replaceChildren(...Object.entries(presets[tab] ?? {}).map(([title, make]) => {
    const button = document.createElement("button");
    button.textContent = title;
    button.addEventListener("click", () => setPoints(make(random(7)), title));
    return button;
  }));
  fillControls();
  if (tab !== "bandit") showPoints();
  change();
}
for (const button of tabs) {
  button.addEventListener("click", () => select(button.dataset.tab));
  button.addEventListener("keydown", event => {
    const move = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!move) return;
    const next = tabs[(tabs.indexOf(button) + move + tabs.length) % tabs.length];
    next.focus();
    select(next.dataset.tab);
  });
}

// --- begin -----------------------------------------------------------------------------------------------------------
tasks.regression.points = presets.regression.Gap(random(7));
tasks.classification.points = presets.classification.Moons(random(7));
select("regression");
new ResizeObserver(show).observe(byId("show"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
addEventListener("pagehide", () => navigator.sendBeacon(address + "/close"));
(async () => {
  for (;;) {
    if (!document.hidden && isPut) await putting.then(poll);  // a page that nobody sees lets the server rest
    await new Promise(done => setTimeout(done, POLL));
  }
})();
