/* The explorer: kl_comedy.lab.gradients and kl_comedy.lab.variance ported to one small family of policies,
   and the page around it. tests/test_explorer.py holds the numbers against the lab's in a browser, to 1e-9.

   Tokens are read as -1 and +1, and as 0 before the first. The logit of +1 is a + b y1 for the policy
   and A + B y1 + C y2 for the reference, y1 the last token and y2 the one before. The sampling policy's
   logits lie between the two, `stale` of the way to the reference. A state s is (y1, y2), and what
   belongs to token k in state s stands at 2 s + k. Everything is in nats. */
"use strict";
(() => {
const Y1 = [0, -1, 1, -1, 1, -1, 1], Y2 = [0, 0, 0, -1, -1, 1, 1], STATES = 7;
const NEXT = [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 3, 4, 5, 6];
const table = () => new Float64Array(2 * STATES);
const norm = g => Math.hypot(...g), minus = (g, h) => [g[0] - h[0], g[1] - h[1]];

/* Each takes log(reference / policy) to the estimate and its derivative by the log-prob. The page offers
   these estimators, and the exact KL; the package may have more. */
const ESTIMATORS = {
  k1: d => [-d, 1],
  k2: d => [d * d / 2, -d],
  k3: d => {
    let series = 1; // expm1(d) - d cancels near 0
    for (let n = 12; n > 2; n--) series = 1 + d / n * series;
    return [Math.abs(d) < 0.25 ? d * d / 2 * series : Math.expm1(d) - d, -Math.expm1(d)];
  },
};

/* Log-probs of both tokens in every state. */
function logp(a, b, c = 0) {
  const out = table();
  for (let s = 0; s < STATES; s++) {
    const z = a + b * Y1[s] + c * Y2[s];
    out[2 * s] = -Math.log1p(Math.exp(z));
    out[2 * s + 1] = -Math.log1p(Math.exp(-z));
  }
  return out;
}

/* What each token adds, as lab.gradients.Terms: q, its probability among the samples, kl in the reward,
   slope and row in the loss, its weight; `score` is the derivative of its log-prob by the logit of +1. */
function terms(x, config) {
  const lp = logp(x.a, x.b), lr = logp(x.A, x.B, x.C), p = lp.map(Math.exp);
  const mix = v => (1 - x.stale) * v[0] + x.stale * v[1];
  const mu = x.stale
    ? logp(mix([x.a, x.A]), mix([x.b, x.B]), mix([0, x.C])).map(Math.exp) : p;
  const out = {mu, score: table(), kl: table(), slope: table(), row: table(),
    q: config.importance === "sequence" ? p : mu,
    weight: config.importance === "token" ? p.map((v, i) => v / mu[i]) : table().fill(1)};
  const inReward = config.placement !== "loss", inLoss = config.placement !== "reward";
  for (let i = 0; i < 2 * STATES; i++) {
    const s = i & ~1, p1 = p[s + 1], gap = lp[i] - lr[i];
    out.score[i] = (i & 1) - p1;
    if (config.estimator === "exact") {
      const kl = p[s] * (lp[s] - lr[s]) + p1 * (lp[s + 1] - lr[s + 1]);
      if (inReward) out.kl[i] = kl;
      if (inLoss) out.row[i] = p1 * (lp[s + 1] - lr[s + 1] - kl);
    } else {
      const [kl, slope] = ESTIMATORS[config.estimator](-gap);
      if (inReward) out.kl[i] = kl;
      if (inLoss) out.slope[i] = slope;
    }
  }
  return out;
}

/* Of a sequence: KL to the reference, the chance that its last token is +1, and the gradients of both.
   The derivative of the states' distribution is carried forward with it. */
function exact(x) {
  const lp = logp(x.a, x.b), lr = logp(x.A, x.B, x.C), p = lp.map(Math.exp);
  const out = {kl: 0, gradient: [0, 0], pass: 0, passGradient: [0, 0]};
  let now = new Float64Array(3 * STATES), after = new Float64Array(3 * STATES);
  now[0] = 1;
  for (let t = 0; t < x.T; t++) {
    after.fill(0);
    for (let s = 0; s < STATES; s++) {
      const d = now[3 * s], da = now[3 * s + 1], db = now[3 * s + 2];
      const g0 = lp[2 * s] - lr[2 * s], g1 = lp[2 * s + 1] - lr[2 * s + 1];
      const kl = p[2 * s] * g0 + p[2 * s + 1] * g1, slope = d * p[2 * s] * p[2 * s + 1];
      out.kl += d * kl;
      out.gradient[0] += da * kl + slope * (g1 - g0);
      out.gradient[1] += db * kl + slope * (g1 - g0) * Y1[s];
      for (let i = 2 * s; i < 2 * s + 2; i++) {
        const to = 3 * NEXT[i], turn = i & 1 ? slope : -slope;
        after[to] += d * p[i];
        after[to + 1] += da * p[i] + turn;
        after[to + 2] += db * p[i] + turn * Y1[s];
      }
    }
    [now, after] = [after, now];
  }
  for (let s = 0; s < STATES; s++) if (Y1[s] > 0) {
    out.pass += now[3 * s];
    out.passGradient[0] += now[3 * s + 1];
    out.passGradient[1] += now[3 * s + 2];
  }
  return out;
}

/* lab.gradients.expected_gradient */
function expected(x, config) {
  const {q, score, kl, slope, row, weight} = terms(x, config), T = x.T, g = [0, 0];
  const ahead = new Float64Array((T + 1) * STATES); // estimates expected in state s from step t on
  for (let t = T - 1; t >= 0; t--) for (let i = 0; i < 2 * STATES; i++)
    ahead[t * STATES + (i >> 1)] += q[i] * (kl[i] + ahead[(t + 1) * STATES + NEXT[i]]);
  const later = config.credit !== "token", earlier = config.credit === "sequence";
  let now = table(), after = table(); // of each state: its probability, and that times its past
  now[0] = 1;
  for (let t = 0; t < T; t++) {
    after.fill(0);
    for (let i = 0; i < 2 * STATES; i++) {
      const s = i >> 1, flow = now[2 * s] * q[i], past = now[2 * s + 1] * q[i];
      let credit = flow * (kl[i] + slope[i]);
      if (later) credit += flow * ahead[(t + 1) * STATES + NEXT[i]];
      if (earlier) credit += past;
      const both = weight[i] * (credit * score[i] + flow * row[i]);
      g[0] += both;
      g[1] += both * Y1[s];
      after[2 * NEXT[i]] += flow;
      after[2 * NEXT[i] + 1] += past + flow * kl[i];
    }
    [now, after] = [after, now];
  }
  return g;
}

/* lab.variance.gradient_variance, without a baseline: z = (1, K, F, M) moves linearly with each token, and
   its second moments Z, symmetric, as A Z A'. */
function variance(x, config) {
  const {mu, q, score, kl, slope, row, weight} = terms(x, config);
  const later = config.credit !== "token", earlier = config.credit === "sequence";
  const chance = q.map((v, i) => config.importance === "sequence" ? v * v / mu[i] : v);
  const step = Array.from({length: 4}, () => new Float64Array(4)), half = new Float64Array(16);
  let total = -(norm(expected(x, config)) ** 2);
  for (const feature of [() => 1, s => Y1[s]]) {
    let now = new Float64Array(16 * STATES), after = new Float64Array(16 * STATES);
    now[0] = 1;
    for (let t = 0; t < x.T; t++) {
      after.fill(0);
      for (let i = 0; i < 2 * STATES; i++) {
        const s = i >> 1, from = 16 * s, to = 16 * NEXT[i], f = weight[i] * score[i] * feature(s);
        if (!now[from]) continue;
        for (let j = 0; j < 4; j++) step[j][j] = 1;
        step[1][0] = kl[i];
        step[2][0] = f;
        step[3][0] = (kl[i] + slope[i]) * f + weight[i] * row[i] * feature(s);
        step[3][1] = earlier ? f : 0;
        step[3][2] = later ? kl[i] : 0;
        for (let j = 0; j < 4; j++) for (let k = 0; k < 4; k++) {
          half[4 * j + k] = 0;
          for (let l = 0; l <= j; l++) half[4 * j + k] += step[j][l] * now[from + 4 * l + k];
        }
        for (let j = 0; j < 4; j++) for (let k = 0; k < 4; k++) for (let l = 0; l <= k; l++)
          after[to + 4 * j + k] += chance[i] * half[4 * j + l] * step[k][l];
      }
      [now, after] = [after, now];
    }
    for (let s = 0; s < STATES; s++) total += now[16 * s + 15];
  }
  return total;
}

/* The gradient that descent follows: of the penalty, as `config` has it in expectation or exactly if it
   is null, minus `reward` times that of the chance that the last token is +1. */
function field(x, config) {
  if (config && !x.reward) return expected(x, config);
  const {gradient, passGradient: r} = exact(x);
  return minus(config ? expected(x, config) : gradient, [x.reward * r[0], x.reward * r[1]]);
}

const EDGE = 3, STEPS = 4000, CLIP = 0.05, STILL = 1e-7;

/* Gradient descent on `field` with the rate 1 / T and steps of at most CLIP, until a step is shorter
   than STILL or the policy is off the map. `path` holds every policy on the way. */
function descend(x, config) {
  const path = [[x.a, x.b]];
  for (let n = 0, a = x.a, b = x.b; n < STEPS; n++) {
    const g = field({...x, a, b}, config), rate = Math.min(1 / x.T, CLIP / norm(g));
    if (norm(g) * rate < STILL) return {path, a, b, fate: n ? "ends" : "stays"};
    a -= rate * g[0];
    b -= rate * g[1];
    path.push([a, b]);
    if (Math.abs(a) > EDGE || Math.abs(b) > EDGE) return {path, a, b, fate: "leaves"};
  }
  const [a, b] = path.at(-1);
  return {path, a, b, fate: "moves"};
}

/* How much the field turns: 0 wherever it is the gradient of something. */
function curl(x, config, h = 1e-3) {
  const at = (da, db) => field({...x, a: x.a + da, b: x.b + db}, config);
  const turn = d => at(d, 0)[1] - at(-d, 0)[1] - at(0, d)[0] + at(0, -d)[0];
  return (8 * turn(h) - turn(2 * h)) / (12 * h);
}

/* Everything about one policy; null where it has no meaning, and zero is what rounding leaves. */
function compute(x, config) {
  const {kl, gradient, pass} = exact(x), found = expected(x, config);
  const size = norm(gradient), bias = norm(minus(found, gradient)), tiny = 1e-12 * x.T;
  const spread = variance(x, config);
  return {kl, pass, gradient, expected: found, bias, variance: spread,
    relative: size > tiny ? bias / size : null,
    relativeVariance: size > tiny ? spread / size ** 2 : null,
    cosine: size > tiny && norm(found) > tiny
      ? (found[0] * gradient[0] + found[1] * gradient[1]) / (size * norm(found)) : null,
    curl: curl(x, config)};
}

const CHOICES = {estimator: [...Object.keys(ESTIMATORS), "exact"], placement: ["reward", "loss", "both"],
  credit: ["sequence", "to_go", "token"], importance: ["none", "token", "sequence"]};

/* Of theory.config.KLConfig: what it allows, and its label. */
const allowed = c => Object.keys(CHOICES).every(name => CHOICES[name].includes(c[name]))
  && (c.placement !== "loss" || c.credit === "sequence");
function label(c) {
  const name = c.estimator === "exact" ? "exact KL" : c.estimator.toUpperCase();
  return `${name} in ${c.placement}`
    + {sequence: "", to_go: ", to-go credit", token: ", token credit"}[c.credit]
    + (c.importance === "none" ? "" : `, ${c.importance} ratio`);
}

window.klExplorer = {CHOICES, allowed, label, exact, expected, variance, field, descend, compute};

/* ---- the page ---- */

const WORDS = {
  estimator: ["Estimator", {k1: "K1", k2: "K2", k3: "K3", exact: "exact KL"}],
  placement: ["Acts in", {reward: "the reward", loss: "the loss", both: "both"}],
  credit: ["Credit", {sequence: "sequence", to_go: "to-go", token: "own token"}],
  importance: ["Weights", {none: "none", token: "token ratio", sequence: "sequence ratio"}],
};
const SLIDERS = { // name: [group, words, least, most, step, start]; T is the exponent of 2
  a: ["Policy", "a, towards +1", -2.5, 2.5, 0.05, -1], b: ["Policy", "b, repeat the last", -2.5, 2.5, 0.05, 1],
  A: ["Reference", "A, towards +1", -2, 2, 0.1, 0.5], B: ["Reference", "B, repeat the last", -2, 2, 0.1, 0.5],
  C: ["Reference", "C, the one before", -2, 2, 0.1, 1],
  T: ["Task", "T, tokens", 0, 7, 1, 4], reward: ["Task", "reward, 1/\u03b2", 0, 20, 0.5, 0],
  stale: ["Task", "stale samples", 0, 1, 0.05, 0],
};
const START = {estimator: "k3", placement: "loss", credit: "sequence", importance: "none"};
const ROWS = {gradient: "gradient (a, b)", bias: "bias", cosine: "cosine to g*", variance: "variance",
  curl: "curl", end: "descent ends at", kl: "KL there, nats", pass: "ends in +1 there"};
const SIZE = 480, LEFT = 36, TOP = 8, SPAN = 436;
const px = a => LEFT + (a + EDGE) / (2 * EDGE) * SPAN, py = b => TOP + (EDGE - b) / (2 * EDGE) * SPAN;
const signed = text => text.replaceAll("-", "\u2212");
const brief = v => Math.abs(v) < 1e-9 ? "0" : signed(Math.abs(v) < 1e-3 || Math.abs(v) >= 1e5
  ? v.toExponential(2) : String(+v.toPrecision(3)));
const pair = ([a, b], digits) => `(${[a, b].map(v => digits ? signed(v.toFixed(digits)) : brief(v)).join(", ")})`;
const percent = v => `${brief(100 * v)} %`;

function markup() {
  const select = ([name, [title, words]]) => `<label>${title}<select name="${name}">`
    + CHOICES[name].map(v => `<option value="${v}"${v === START[name] ? " selected" : ""}>`
      + `${words[v]}</option>`).join("") + "</select></label>";
  const slider = ([name, [, title, least, most, step, start]]) =>
    `<label><span>${title} <b aria-hidden="true"></b></span><input type="range" name="${name}" min="${least}" `
    + `max="${most}" step="${step}" value="${start}"></label>`;
  const group = title => `<fieldset><legend>${title}</legend>`
    + Object.entries(SLIDERS).filter(([, v]) => v[0] === title).map(slider).join("") + "</fieldset>";
  const ticks = [-2, 0, 2].map(v => `<path class="grid" d="M${px(v)} ${TOP}v${SPAN}M${LEFT} ${py(v)}h${SPAN}"/>`
    + `<text x="${px(v)}" y="${TOP + SPAN + 16}" text-anchor="middle">${signed(String(v))}</text>`
    + `<text x="${LEFT - 6}" y="${py(v) + 5}" text-anchor="end">${signed(String(v))}</text>`).join("");
  return `<form><fieldset class="configuration"><legend>Configuration</legend>`
    + Object.entries(WORDS).map(select).join("") + "</fieldset>"
    + ["Policy", "Reference", "Task"].map(group).join("") + "</form>"
    + `<div class="map"><p class="key"><span class="true">g*</span> <span class="mine"></span></p>`
    + `<svg viewBox="0 0 ${SIZE} ${SIZE}" role="img" aria-labelledby="kl-summary">`
    + `<clipPath id="kl-plot"><rect x="${LEFT}" y="${TOP}" width="${SPAN}" height="${SPAN}"/></clipPath>${ticks}`
    + `<text x="${LEFT + SPAN}" y="${TOP + SPAN + 30}" text-anchor="end">a \u2192</text>`
    + `<text x="4" y="${TOP + 12}">b \u2191</text>`
    + `<rect class="frame" x="${LEFT}" y="${TOP}" width="${SPAN}" height="${SPAN}"/><g clip-path="url(#kl-plot)">`
    + `<path class="true arrows"/><path class="mine arrows"/><path class="true path"/><path class="mine path"/></g>`
    + `<g class="marks"></g></svg></div>`
    + `<p id="kl-summary" role="status"></p><table><thead><tr><td></td><th scope="col">exact, g*</th>`
    + `<th scope="col" class="mine"></th></tr></thead><tbody>`
    + Object.entries(ROWS).map(([name, title]) => `<tr><th scope="row">${title}</th>`
      + `<td data-name="true-${name}"></td><td data-name="${name}"></td></tr>`).join("") + "</tbody></table>";
}

/* Arrows against the field on a grid: their length saturates, half a cell at the field's median. */
function arrows(gradients, median, cell) {
  return gradients.map(([a, b, g]) => {
    const n = norm(g);
    if (n < 1e-9 * median || !n) return `M${px(a) - 1} ${py(b)}h2`;
    const length = 0.95 * cell * n / (n + median), ux = -g[0] / n, uy = g[1] / n;
    const x = px(a) + ux * length, y = py(b) + uy * length, h = Math.min(5, length / 2);
    const barb = s => `L${(x - h * (ux + s * uy * 0.6)).toFixed(1)} ${(y - h * (uy - s * ux * 0.6)).toFixed(1)}`;
    const tip = `${x.toFixed(1)} ${y.toFixed(1)}`;
    return `M${px(a).toFixed(1)} ${py(b).toFixed(1)}L${tip}${barb(1)}M${tip}${barb(-1)}`;
  }).join("");
}

/* A path without the points closer than a pixel to the last one kept. */
function line(path) {
  let last = path[0], out = `M${px(last[0])} ${py(last[1])}`;
  path.forEach((point, i) => {
    if (i < path.length - 1 && norm(minus(point, last)) < 0.02) return;
    last = point;
    out += `L${px(point[0]).toFixed(1)} ${py(point[1]).toFixed(1)}`;
  });
  return out;
}

const FATES = {ends: "ends at", stays: "does not move from", leaves: "leaves the map at", moves: "still moves at"};

function start(root) {
  root.innerHTML = markup();
  const form = root.querySelector("form"), find = q => root.querySelector(q), inputs = form.elements;
  let said = 0, due = 0;

  function read() {
    const config = {}, x = {};
    inputs.credit.disabled = inputs.placement.value === "loss"; // no estimate in the reward
    if (inputs.credit.disabled) inputs.credit.value = "sequence";
    for (const name in CHOICES) config[name] = inputs[name].value;
    for (const name in SLIDERS) x[name] = +inputs[name].value;
    x.T = 2 ** x.T;
    return [x, config];
  }

  function update() {
    due = 0;
    const [x, config] = read(), name = label(config);
    for (const k in SLIDERS) {
      inputs[k].previousElementSibling.lastChild.textContent = signed(String(x[k]));
      inputs[k].setAttribute("aria-valuetext", x[k]);
    }
    root.style.setProperty("--config", window.klColours[`${config.estimator}-${config.placement}`]);
    root.querySelectorAll(".key .mine, th.mine").forEach(e => { e.textContent = name; });

    const found = compute(x, config), mine = descend(x, config), best = descend(x, null);
    const there = exact({...x, a: mine.a, b: mine.b}), ideal = exact({...x, a: best.a, b: best.b});
    const k1 = variance(x, {...START, estimator: "k1", placement: "reward"});
    const cell = (key, text, value) => {
      const td = find(`td[data-name="${key}"]`);
      td.textContent = text;
      td.dataset.value = JSON.stringify(value);
    };
    cell("true-gradient", pair(found.gradient), found.gradient);
    cell("gradient", pair(found.expected), found.expected);
    cell("true-bias", "0", 0);
    const share = found.relative === null ? "" : `, ${percent(found.relative)} of g*`;
    cell("bias", brief(found.bias) + share, found.bias);
    cell("true-cosine", "1", 1);
    cell("cosine", found.cosine === null ? "no direction" : brief(found.cosine), found.cosine);
    cell("true-variance", "0", 0);
    cell("variance", brief(found.variance) + (k1 > 0 ? `, ${brief(found.variance / k1)} times K1 in reward` : ""),
      found.variance);
    cell("true-curl", "0", 0);
    cell("curl", Math.abs(found.curl) < 1e-6 ? "0" : brief(found.curl), found.curl);
    const end = d => (d.fate === "ends" ? "" : `${d.fate} `) + pair([d.a, d.b], 3);
    cell("true-end", end(best), [best.a, best.b]);
    cell("end", end(mine), [mine.a, mine.b]);
    cell("true-kl", brief(ideal.kl), ideal.kl);
    cell("kl", brief(there.kl), there.kl);
    cell("true-pass", percent(ideal.pass), ideal.pass);
    cell("pass", percent(there.pass), there.pass);
    draw(x, config, name, mine, best);

    const apart = norm([mine.a - best.a, mine.b - best.b]);
    const words = `${name}, ${x.T} token${x.T > 1 ? "s" : ""}: ` + (found.relative === null
      ? "the policy is its reference, and g* is zero. "
      : `bias ${percent(found.relative)} of g*`
        + (found.cosine === null ? ", the gradient is zero. " : `, cosine ${brief(found.cosine)}. `))
      + `Variance ${brief(found.variance)} a sequence. `
      + `Descent ${FATES[mine.fate]} ${pair([mine.a, mine.b], 2)}, ${brief(there.kl)} nats from the reference`
      + (mine.fate === best.fate && apart < 1e-3 ? ", as it does along g*."
        : `; along g* it ${FATES[best.fate]} ${pair([best.a, best.b], 2)}, ${brief(ideal.kl)} nats from it.`);
    clearTimeout(said); // a screen reader hears where a control comes to rest
    said = setTimeout(() => { find("#kl-summary").textContent = words; }, said && 250);
  }

  function draw(x, config, name, mine, best) {
    const N = 10, cell = SPAN / N, points = [];
    for (let i = 0; i < N; i++) for (let j = 0; j < N; j++)
      points.push([(2 * i + 1) / N * EDGE - EDGE, (2 * j + 1) / N * EDGE - EDGE]);
    const along = c => points.map(([a, b]) => [a, b, field({...x, a, b}, c)]);
    const exactly = along(null), median = exactly.map(v => norm(v[2])).sort((u, v) => u - v)[N * N / 2];
    find(".true.arrows").setAttribute("d", arrows(exactly, median, cell));
    find(".mine.arrows").setAttribute("d", arrows(along(config), median, cell));
    find(".true.path").setAttribute("d", line(best.path));
    find(".mine.path").setAttribute("d", line(mine.path));
    const clamp = v => Math.max(-EDGE, Math.min(EDGE, v)), taken = [];
    const marks = [["mine", [mine.a, mine.b], name], ["true", [best.a, best.b], "g*"],
      ["reference", [x.A, x.B], x.C ? "reference's A, B" : "reference"], ["policy", [x.a, x.b], "policy"]]
      .map(([kind, [a, b], text]) => ({kind, text, x: px(clamp(a)), y: py(clamp(b))}));
    for (const m of marks) taken.push([m.x - 7, m.y - 7, m.x + 7, m.y + 7]);
    for (const {path} of [mine, best]) path.forEach(([a, b], i) => {
      if (i % 5 === 0) taken.push([px(a) - 3, py(b) - 3, px(a) + 3, py(b) + 3]);
    });
    const free = box => box[0] > LEFT && box[2] < LEFT + SPAN && box[1] > TOP && box[3] < TOP + SPAN
      && !taken.some(o => box[0] < o[2] && o[0] < box[2] && box[1] < o[3] && o[1] < box[3]);
    const labelled = m => { // the first place of those around a mark that is free
      const wide = 8 * m.text.length + 4, boxes = [];
      for (const up of [0, -14, 14, -30, 30, -46, 46]) for (const left of [m.x + 9, m.x - 9 - wide, m.x - wide / 2])
        boxes.push([left, m.y + up - 8, left + wide, m.y + up + 8]);
      const box = boxes.find(free) || boxes[0];
      taken.push(box);
      const shape = m.kind === "reference" ? `<path d="M${m.x - 6} ${m.y - 6}l12 12m-12 0l12 -12"/>`
        : `<circle cx="${m.x}" cy="${m.y}" r="${m.kind === "policy" ? 7 : 5}"/>`;
      return `<g class="${m.kind}">${shape}<text x="${box[0] + 2}" y="${box[1] + 13}">${m.text}</text></g>`;
    };
    find(".marks").innerHTML = marks.map(labelled).join("");
  }

  const soon = () => {
    read(); // what may be chosen changes at once, the numbers with the next frame
    due ||= requestAnimationFrame(update);
  };
  form.addEventListener("input", soon);
  form.addEventListener("submit", event => event.preventDefault());
  find("svg").addEventListener("click", event => { // the policy goes where the map is clicked
    const box = find("svg").getBoundingClientRect(), scale = SIZE / box.width;
    inputs.a.value = ((event.clientX - box.left) * scale - LEFT) / SPAN * 2 * EDGE - EDGE;
    inputs.b.value = EDGE - ((event.clientY - box.top) * scale - TOP) / SPAN * 2 * EDGE;
    soon();
  });
  for (const button of document.querySelectorAll("button[data-settings]")) button.onclick = () => {
    form.reset();
    for (const [name, value] of Object.entries(JSON.parse(button.dataset.settings)))
      inputs[name].value = name === "T" ? Math.log2(value) : value;
    update();
    inputs.estimator.focus({preventScroll: true});
    root.scrollIntoView();
  };
  update();
}

addEventListener("DOMContentLoaded", () => {
  const root = document.getElementById("kl-explorer");
  if (root) start(root);
});
})();
