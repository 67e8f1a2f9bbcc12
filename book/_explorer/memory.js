// Draws what the data of the page say for the step that the reader chooses; see ackpt/experiments/widgets/memory_bars.py.
const RESIDENT = ["parameters", "buffers", "inputs", "optimizer"];
const SIZES = { seq_len: ["Tokens of a sequence", (n) => count(n)], image_size: ["Image", (n) => `${n} × ${n} pixels`] };
const count = (n) => n.toLocaleString("en-GB");

const drawBars = (svg, data, step, chosen) => {
  const names = Object.keys(data.policies);
  const highest = Math.max(...names.map((name) => step.plans[name]?.peak_bytes ?? 0)) * 1.08;
  const wide = (RIGHT - LEFT) / names.length, bar = 0.6 * wide;
  const y = (bytes) => BOTTOM - ((BOTTOM - TOP) * bytes) / highest;
  const parts = [], said = [];
  names.forEach((name, place) => {
    const plan = step.plans[name], left = LEFT + place * wide + (wide - bar) / 2, middle = (left + bar / 2).toFixed(1);
    const [short] = data.policies[name];
    if (!plan) {
      parts.push(`<text x="${middle}" y="${BOTTOM - 6}" text-anchor="middle">refused</text>`);
      said.push(`${short} is refused`);
      return;
    }
    const stack = data.categories.map((category) => [COLORS[category], plan.at_peak[category] ?? 0]);
    const { markup, bytes } = stacked(stack, left, bar, y), top = y(bytes);
    parts.push(markup);
    if (name === chosen) {
      parts.push(`<rect class="chosen" x="${(left - 2).toFixed(1)}" y="${(top - 2).toFixed(1)}" width="${(bar + 4).toFixed(1)}" height="${(BOTTOM - top + 2).toFixed(1)}"/>`);
    }
    parts.push(`<text x="${middle}" y="${(top - 6).toFixed(1)}" text-anchor="middle">${(plan.peak_bytes / MIB).toFixed(0)}</text>`);
    said.push(`${short} ${mib(plan.peak_bytes)}`);
  });
  const ticks = steps(highest / MIB, 5).map((at) => [y(at * MIB), +at.toFixed(3)]);
  svg.innerHTML = frame([], ticks, "policy", "memory at the peak (MiB)") + parts.join("");
  nameBars(svg, names.map((name) => data.policies[name][0]), names.indexOf(chosen));
  svg.setAttribute("aria-label", `Memory at the peak by policy: ${said.join(", ")}.`);
};

const build = (root, data) => {
  const choices = element("div", root, "", { class: "choices" });
  const choice = (name, title) => {
    const box = element("div", choices), id = `memory-explorer-${name}`;
    return { label: element("label", box, title, { for: id }), select: element("select", box, "", { id }) };
  };
  const model = choice("model", "Model"), size = choice("size", ""), policy = choice("policy", "Policy");
  const option = (select, value, label) => element("option", select, label, { value });
  data.models.forEach((one, place) => option(model.select, place, one.label));
  for (const [name, [short, does]] of Object.entries(data.policies)) option(policy.select, name, `${short}: ${does}`);

  const answer = element("p", root, "", { class: "answer", "aria-live": "polite" });
  const charts = element("div", root, "", { class: "charts" });
  const svg = drawing(element("div", charts), "Live memory at the peak");
  const beside = element("div", charts);
  element("h4", beside, "The bar of the policy");
  const numbers = element("dl", beside);
  const legend = element("ul", root, "", { class: "legend" });
  for (const name of [...data.categories].reverse()) key(legend, name, { style: `background:${COLORS[name]}` });
  element("h4", root, "The formula, with its numbers");
  const formula = element("dl", root, "", { class: "formula" });

  const line = (title, symbols, filled, bytes) => {
    element("dt", formula, title);
    const box = element("dd", formula);
    element("span", box, symbols);
    element("span", box, `= ${filled}`);
    element("b", element("span", box, "= "), `${count(bytes)} bytes, ${mib(bytes)}`);
  };

  let wanted = data.models[0].steps[1].size;
  const chooseSizes = () => {
    const { option: name, steps: all } = data.models[+model.select.value];
    const [title, shown] = SIZES[name];
    size.label.textContent = title;
    size.select.replaceChildren();
    all.forEach((step, place) => option(size.select, place, shown(step.size)));
    size.select.selectedIndex = Math.max(0, all.findIndex((step) => step.size === wanted));
  };

  const show = () => {
    const step = data.models[+model.select.value].steps[+size.select.value];
    wanted = step.size;
    const name = policy.select.value;
    const refused = !step.plans[name];
    const plan = step.plans[name] ?? step.plans.least, plain = step.plans.none;
    const resident = RESIDENT.reduce((sum, category) => sum + (plan.at_peak[category] ?? 0), 0);
    answer.className = refused ? "answer refused" : "answer";
    answer.textContent = `${step.title}. ` + (refused
      ? `Refused: half of the baseline's dynamic peak is ${mib((plain.peak_bytes - resident) / 2)}, and the lowest that policy auto can plan is ` +
        `${mib(step.least_bytes)}. Below are the numbers of that plan.`
      : `The peak is ${mib(plan.peak_bytes)}, ${percent(plan.peak_bytes / plain.peak_bytes)} of the baseline's; ` +
        `${percent(plan.recompute_flops / plan.flops)} of the baseline's FLOPs are recomputed.`);
    numbers.replaceChildren();
    for (const category of data.categories) {
      const box = element("div", numbers);
      element("dt", box, category);
      element("dd", box, `${mib(plan.at_peak[category] ?? 0)}, ${percent((plan.at_peak[category] ?? 0) / plan.peak_bytes)}`);
    }
    formula.replaceChildren();
    line("resident", step.always.symbols, step.always.numbers, step.always.bytes);
    line("saved by the forward of the baseline", step.kept.symbols, step.kept.numbers, step.kept.bytes);
    if (plan.kept.dropped || plan.kept.instead) {
      const { all, dropped, instead, bytes } = plan.kept;
      line("saved by the plan's forward", "baseline − recomputed + saved instead",
        `${count(all)} − ${count(dropped)} + ${count(instead)}`, bytes);
    }
    const dynamic = data.categories.filter((category) => !RESIDENT.includes(category));
    line("at the peak", ["resident", ...dynamic].join(" + "),
      [resident, ...dynamic.map((category) => plan.at_peak[category] ?? 0)].map(count).join(" + "), plan.peak_bytes);
    drawBars(svg, data, step, refused ? "least" : name);
  };

  model.select.addEventListener("change", () => { chooseSizes(); show(); });
  for (const { select } of [size, policy]) select.addEventListener("change", show);
  chooseSizes();
  show();
};

start("memory-explorer", build);
