// Evaluates the formulas of the page's data for what the reader chooses; see experiments/calculator/settings.py.
const GIB = 2 ** 30;
const gib = (bytes) => bytes < GIB / 10 ? mib(bytes) : `${(bytes / GIB).toFixed(bytes < 10 * GIB ? 2 : 1)} GiB`;
const sum = (row) => Object.values(row).reduce((total, bytes) => total + bytes, 0);
const GROUPS = { // of the categories that `ackpt plan` prints; the others have a color of their own
  buffers: "buffers and inputs", inputs: "buffers and inputs", "unreduced gradients": "gradients",
  "gathered parameters": "gathered and collectives", collectives: "gathered and collectives",
};
const SHADES = { ...COLORS, "buffers and inputs": COLORS.buffers, "gathered and collectives": COLORS.inputs };
const ORDER = [
  "parameters", "optimizer", "gradients", "buffers and inputs", "gathered and collectives", "activations",
  "recomputed", "temporaries",
];
const BATCHES = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024];
const LENGTHS = [128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768];
// One step of a model on a GPU: its bytes at the peak and its FLOPs, by policy and number of checkpointed blocks.
const stepOf = (data, { model, gpu, mode, optimizer, batch, length, ranks }) => {
  const isSharded = ranks > 1, part = isSharded ? model.sharded[mode] : model.modes[mode];
  const place = data.ranks.indexOf(ranks);
  const formulas = model.formulas[part.formulas[data.gpus[gpu].kind]];
  const terms = data.terms.map(([i, j]) => batch ** i * (length ? length / data.unit : 1) ** j);
  const value = (coefficients = []) => coefficients.reduce((total, c, at) => total + c * terms[at], 0);
  const bytes = ([sizes, byBlock, byRanks, both], m) =>
    value(sizes) + m * value(byBlock) + (byRanks?.[place] ?? 0) + m * (both?.[place] ?? 0);
  const live = (row, m) => Object.fromEntries(Object.entries(row).map(([name, parts]) => [name, bytes(parts, m)]));
  const parameters = isSharded ? part.parameters[place] : part.parameters;
  let [state, step, more = 0] = part.optimizers[optimizer];
  if (isSharded) [state, step] = [state * parameters + more, step * parameters];
  const resident = { parameters, buffers: part.buffers, inputs: value(part.inputs), optimizer: state };
  return {
    blocks: formulas.blocks,
    policies: formulas.peaks,
    flops: value(formulas.flops),
    peak: (policy, m) => {
      const end = live(formulas.end, m);
      end.temporaries = (end.temporaries ?? 0) + step;
      const rows = [...formulas.peaks[policy].map((row) => live(row, m)), end];
      const highest = rows.reduce((best, row) => (sum(row) > sum(best) ? row : best));
      return { ...resident, ...highest };
    },
    recomputed: (policy, m) => policy === "none" ? 0 : policy === "per block" ? value(formulas.recomputed)
      : value(formulas.recomputed_by_m[0]) + m * value(formulas.recomputed_by_m[1]),
  };
};

// The plans of the menu, the cheapest first.
const plansOf = (step) => {
  const plan = (policy, m) => {
    const atPeak = step.peak(policy, m);
    return { policy, m, atPeak, bytes: sum(atPeak), cost: step.recomputed(policy, m) / step.flops };
  };
  const between = "first blocks" in step.policies
    ? Array.from({ length: step.blocks - 3 }, (_, at) => plan("first blocks", at + 2)) : [];
  return [plan("none", 0), ...between, plan("per block", step.blocks)];
};

const drawPlans = (svg, bars, budget, most) => {
  const highest = Math.max(most, ...bars.map((bar) => bar.bytes)) * 1.06;
  const wide = (RIGHT - LEFT) / bars.length, bar = Math.min(0.6 * wide, 90);
  const y = (bytes) => BOTTOM - ((BOTTOM - TOP) * bytes) / highest;
  const parts = [];
  bars.forEach((plan, place) => {
    const left = LEFT + place * wide + (wide - bar) / 2;
    const { markup, bytes } = stacked(ORDER.map((name) => [SHADES[name], plan.groups[name] ?? 0]), left, bar, y);
    parts.push(markup);
    parts.push(`<text x="${(left + bar / 2).toFixed(1)}" y="${(y(bytes) - 4).toFixed(1)}" text-anchor="middle">${(bytes / GIB).toFixed(1)}</text>`);
  });
  parts.push(`<path class="limit" d="M${LEFT} ${y(most).toFixed(1)}H${RIGHT}"/>`);
  parts.push(`<path class="broken" d="M${LEFT} ${y(budget).toFixed(1)}H${RIGHT}"/>`);
  const ticks = steps(highest / GIB, 5).map((at) => [y(at * GIB), +at.toFixed(2)]);
  svg.innerHTML = frame([], ticks, "recomputed in backward", "memory at the peak (GiB)") + parts.join("");
  nameBars(svg, bars.map((plan) => plan.name), bars.findIndex((plan) => plan.isChosen));
  const said = bars.map((plan) => `${plan.name} recomputed ${gib(plan.bytes)}`).join(", ");
  svg.setAttribute("aria-label", `Memory at the peak: ${said}. The GPU has room for ${gib(most)}.`);
};

const nameOf = ({ policy, m }, blocks) =>
  policy === "none" ? "nothing" : policy === "per block" ? "every block" : `first ${m} of ${blocks} blocks`;

const build = (root, data) => {
  const choices = element("div", root, "", { class: "choices" });
  const selects = {};
  const choice = (name, title) => {
    const box = element("div", choices), id = `calculator-${name}`;
    element("label", box, title, { for: id });
    selects[name] = element("select", box, "", { id });
  };
  const titles = {
    model: "Model", gpu: "GPU", batch: "Batch size", length: "Size of an example", mode: "What is trained, in which dtype",
    optimizer: "Optimizer", ranks: "GPUs (FSDP2); the batch is that of one",
  };
  for (const [name, title] of Object.entries(titles)) choice(name, title);
  const budgetBox = element("div", choices);
  const budgetLabel = element("label", budgetBox, "Budget", { for: "calculator-budget" });
  const budgetInput = element("input", budgetBox, "", { id: "calculator-budget", type: "range", min: 5, max: 100, step: 1, value: 100 });

  const answer = element("p", root, "", { class: "answer", "aria-live": "polite" });
  const charts = element("div", root, "", { class: "charts" });
  const svg = drawing(element("div", charts), "Memory of one GPU at the peak");
  const legend = element("ul", svg.parentElement, "", { class: "legend" });
  const beside = element("div", charts);
  const chosenTitle = element("h4", beside, "");
  const numbers = element("dl", beside);
  const callTitle = element("h4", root, "In Python");
  const call = element("pre", root, "", { tabindex: 0 });
  element("h4", root, "In a shell: the same step, planned");
  const command = element("pre", root, "", { tabindex: 0 });
  element("p", root, "The bars hold what ackpt plan counts as allocated. The room of the GPU is its memory without the CUDA context and two "
    + "workspaces of cuBLAS. The allocator reserves more, as ackpt plan prints, and communication libraries and convolution "
    + "kernels take memory of their own, so leave some room. The menu: nothing recomputed, the first blocks, or every "
    + "block; ackpt.apply_budget searches more plans. The address of this page keeps your choices.", { class: "note" });

  const presets = [...data.presets].sort((one, other) => one.modes.half.count - other.modes.half.count);
  const fill = (name, options, wanted) => { // keeps the choice if it is still there
    const select = selects[name];
    select.replaceChildren();
    for (const [value, label] of options) element("option", select, label, { value });
    const index = options.findIndex(([value]) => String(value) === String(wanted));
    select.selectedIndex = Math.max(0, index);
  };
  // The sizes of the menu, and one that an address names.
  const sizes = (values, wanted, most) => {
    const all = values.filter((n) => n <= most), n = Math.round(+wanted);
    return n >= 1 && n <= most && !all.includes(n) ? [...all, n].sort((a, b) => a - b) : all;
  };

  const wanted = { model: "llama-3-8b", gpu: "a100-80g", batch: 4, length: 4096, mode: "lora", optimizer: "adamw", ranks: 1, budget: 90 };
  const fromAddress = () => {
    const hash = new URLSearchParams(location.hash.startsWith("#calculator&") ? location.hash.slice(12) : "");
    for (const name of Object.keys(wanted)) if (hash.has(name)) wanted[name] = hash.get(name);
    return hash.size > 0;
  };

  const show = (changed) => {
    const model = presets.find(({ name }) => name === wanted.model) ?? presets[0];
    fill("model", presets.map(({ name, label }) => [name, label]), wanted.model);
    const kinds = new Set(Object.values(model.modes).flatMap(({ formulas }) => Object.keys(formulas)));
    fill("gpu", Object.entries(data.gpus).filter(([, one]) => kinds.has(one.kind))
      .map(([name, one]) => [name, `${name}, ${(one.memory / GIB).toFixed(0)} GiB`]), wanted.gpu);
    const gpu = data.gpus[selects.gpu.value];
    fill("batch", sizes(BATCHES, wanted.batch, 4096).map((n) => [n, n]), wanted.batch);
    const multiple = data.multiples[model.name] ?? 1, asked = Math.round(Math.min(wanted.length, model.longest) / multiple) * multiple;
    const lengths = model.longest ? sizes(LENGTHS, asked, model.longest) : [0];
    const tokens = (n) => (n ? [`${n.toLocaleString("en-GB")} tokens`] : []), example = data.examples[model.name];
    fill("length", lengths.map((n) => [n, [...tokens(n), ...(example ? [example] : [])].join(", ")]), asked);
    const has = (parts, name) => parts?.[name]?.formulas[gpu.kind] !== undefined;
    const modes = Object.keys(data.modes).filter((name) => has(model.modes, name) || has(model.sharded, name));
    let mode = modes.includes(wanted.mode) ? wanted.mode : modes[0], ranks = model.sharded ? +wanted.ranks : 1;
    if (!has(ranks > 1 ? model.sharded : model.modes, mode)) { // the control that was changed last wins
      if (changed === "ranks") mode = "half";
      else ranks = ranks > 1 ? 1 : data.ranks[0];
    }
    fill("mode", modes.map((name) => [name, data.modes[name].replaceAll("16-bit", gpu.half).replace("16 bits", gpu.half)]), mode);
    fill("ranks", (model.sharded ? [1, ...data.ranks] : [1]).map((n) => [n, n]), ranks);
    const optimizers = ranks > 1 ? data.sharded_optimizers : data.optimizers;
    fill("optimizer", optimizers.map((name) => [name, name]), wanted.optimizer);

    const outside = gpu.context + 2 * gpu.workspace; // one for the forward, one for the backward
    const most = gpu.memory - outside;
    const share = Math.min(100, Math.max(5, Math.round(+wanted.budget) || 100));
    budgetInput.value = share;
    const budget = Math.floor((most * share) / 100 / GIB * 10) / 10 * GIB;
    budgetLabel.textContent = `Budget: ${(budget / GIB).toFixed(1)} GiB, ${share} % of what the GPU leaves`;
    budgetInput.setAttribute("aria-valuetext", `${(budget / GIB).toFixed(1)} GiB`);

    const batch = +selects.batch.value, length = +selects.length.value, optimizer = selects.optimizer.value;
    const step = stepOf(data, { model, gpu: selects.gpu.value, mode, optimizer, batch, length, ranks });
    const plans = plansOf(step), least = plans.reduce((best, plan) => (plan.bytes < best.bytes ? plan : best));
    const fitting = plans.find((plan) => plan.bytes <= budget), chosen = fitting ?? least;
    const groups = (plan) => {
      const found = {};
      for (const [name, bytes] of Object.entries(plan.atPeak)) found[GROUPS[name] ?? name] = (found[GROUPS[name] ?? name] ?? 0) + bytes;
      return found;
    };
    const shown = [...new Set([plans[0], chosen, plans.at(-1)])]
      .map((plan) => ({ ...plan, name: nameOf(plan, step.blocks), groups: groups(plan), isChosen: plan === chosen }));
    drawPlans(svg, shown, budget, most);

    const own = groups(chosen), parts = ORDER.filter((name) => own[name] > 0);
    const largest = [...parts].sort((a, b) => own[b] - own[a]).slice(0, 2);
    const cost = chosen.cost ? `${percent(chosen.cost)} of the baseline's FLOPs are recomputed` : "nothing is recomputed";
    answer.className = fitting ? "answer" : "answer refused";
    answer.textContent = fitting
      ? `Within the budget: ${gib(chosen.bytes)} allocated at the peak, of ${gib(budget)}. `
        + (chosen.policy === "none" ? "No checkpointing is needed." : `The cheapest plan of the menu recomputes ${chosen.policy === "per block" ? "" : "the "}${nameOf(chosen, step.blocks)}; ${cost}.`)
        + ` The step takes ${gib(plans[0].bytes)} without recomputation.`
      : `Nothing on the menu keeps the budget of ${gib(budget)}: its smallest peak is ${gib(least.bytes)}, of it `
        + `${largest.map((name) => `${gib(own[name])} ${name}`).join(" and ")}. `
        + `${hints(model, { mode, ranks, batch, most: data.ranks.at(-1) }).join(", or ")}.`;
    chosenTitle.textContent = `The plan recomputes ${chosen.policy === "first blocks" ? "the " : ""}${nameOf(chosen, step.blocks)}`;
    numbers.replaceChildren();
    for (const name of [...parts].reverse()) {
      const box = element("div", numbers);
      element("dt", box, name);
      element("dd", box, gib(own[name]));
    }
    const cell = element("div", numbers);
    element("dt", cell, "recomputed FLOPs");
    element("dd", cell, percent(chosen.cost));
    legend.replaceChildren();
    const inBars = ORDER.filter((name) => shown.some((plan) => plan.groups[name] > 0));
    for (const name of inBars.reverse()) key(legend, name, { style: `background:${SHADES[name]}` });
    key(legend, "room on the GPU", { style: "height:3px;vertical-align:.25rem;background:var(--pst-color-danger)" });
    key(legend, "budget", { style: "height:0;vertical-align:.25rem;border-top:2px dashed var(--pst-color-text-base)" });

    call.textContent = fitting && ranks === 1 ? callOf(data, optimizer, budget) : "";
    callTitle.hidden = call.hidden = !call.textContent;
    command.textContent = commandOf({ model, mode, optimizer, ranks, batch, length, gpu: selects.gpu.value, half: gpu.half, budget });
    for (const name of Object.keys(titles)) if (name !== "length" || model.longest) wanted[name] = selects[name].value;
    wanted.budget = share;
  };
  const keep = () => {
    const state = new URLSearchParams(wanted);
    try { history.replaceState(null, "", `#calculator&${state}`); } catch { /* a page that may not change its address */ }
  };
  for (const [name, select] of Object.entries(selects)) {
    select.addEventListener("change", () => { wanted[name] = select.value; show(name); keep(); });
  }
  budgetInput.addEventListener("input", () => { wanted.budget = budgetInput.value; show(); keep(); });
  const isAsked = fromAddress();
  show();
  if (isAsked) root.scrollIntoView();
  addEventListener("hashchange", () => { if (fromAddress()) show(); });
};

// What would need less, without what is set already.
const hints = (model, { mode, ranks, batch, most }) => [
  ...(model.longest ? ["Compute the loss in chunks"] : []),
  ...(batch > 1 ? ["take a smaller batch"] : []),
  ...(model.lora && mode !== "lora" ? ["train LoRA adapters"] : []),
  ...(model.sharded && ranks < most ? ["shard over more GPUs"] : []),
  "take a larger GPU",
];

const sizeOf = (budget) => `${(budget / GIB).toFixed(1)}GiB`;

// The call for this budget.
const callOf = (data, optimizer, budget) =>
  data.call.replace("OPTIMIZER", data.made_by[optimizer]).replace("BUDGET", sizeOf(budget));

// The command that plans the same step.
const commandOf = ({ model, mode, optimizer, ranks, batch, length, gpu, half, budget }) => {
  const fields = Object.entries(model.fields).map(([name, field]) => `${name}='${JSON.stringify(field)}'`);
  const quoted = fields.map((text) => text.replace(/='("?)([\w.-]+)\1'$/, "=$2"));
  const sharded = ranks > 1, isHalf = mode === "half" || mode === "lora" || (sharded && mode === "mixed");
  const command = [
    `${model.model.startsWith("hf:") ? "ackpt" : "python -m experiments"} plan ${model.model} --batch-size ${batch}`, length ? `--seq-len ${length}` : "",
    quoted.length ? `--set ${quoted.join(" ")}` : "", `--dtype ${isHalf ? half : "float32"}`,
    mode === "mixed" && !sharded ? `--autocast ${half}` : "",
    mode === "lora" ? `--lora r=16 targets=${model.lora.join(",")}` : "",
    `--optimizer ${optimizer} --device-profile ${gpu}`,
    sharded ? `--fsdp ${ranks}` : "", sharded && mode === "mixed" ? "--shard-dtype float32 --reduce-dtype float32" : "",
    `--budget ${sizeOf(budget)}`,
  ];
  return command.filter(Boolean).join(" ");
};

start("calculator-explorer", build);
