// The choices above the completions, and the beginning of it all.
function fillSelect(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => element("option", { value, text: visible(text) })));
  select.value = chosen;
}

// The choices of step and prompt, as the state has them.
function fillChoices() {
  const { steps } = runNow();
  fillSelect(at("step"), steps.map((step, place) => [String(place), String(step.step)]), String(state.step));
  const groups = groupsOf(stepNow());
  fillSelect(at("group"), groups.map(({ number }, place) => [String(place), String(number)]), String(state.group));
  at("step-before").disabled = state.step === 0;
  at("step-after").disabled = state.step === steps.length - 1;
  at("group-before").disabled = state.group === 0;
  at("group-after").disabled = state.group === groups.length - 1;
}

async function chooseRun(place) {
  state.run = place;
  [state.step, state.group] = runNow().opens; // where there are colours to see
  if (!runNow().rewards.includes(state.right)) state.right = runNow().right;
  fillSelect(at("right"), runNow().rewards.map((name) => [name, name]), state.right);
  at("from").value = String(rightFrom());
  fillChoices();
  await Promise.all([showGroup(), showResults()]);
}

function watchChoices() {
  const changed = (id, act) => at(id).addEventListener("change", (event) => act(event.target.value));
  const clicked = (id, act) => at(id).addEventListener("click", act);
  changed("run", (value) => chooseRun(Number(value)));
  changed("step", (value) => moveStep(Number(value) - state.step));
  changed("group", (value) => moveGroup(Number(value) - state.group));
  clicked("step-before", () => moveStep(-1));
  clicked("step-after", () => moveStep(1));
  clicked("group-before", () => moveGroup(-1));
  clicked("group-after", () => moveGroup(1));
  for (const name of ["filter", "right", "sort"]) {
    changed(name, (value) => {
      state[name] = value;
      return Promise.all([showGroup(), showResults()]);
    });
  }
  at("right").addEventListener("change", () => {
    at("from").value = String(rightFrom());
  });
  changed("from", (value) => {
    if (state.right !== null && value !== "") state.from[state.right] = Number(value);
    at("from").value = String(rightFrom());
    return Promise.all([showGroup(), showResults()]);
  });
  let waiting = null;
  at("search").addEventListener("input", (event) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      state.text = event.target.value;
      showResults();
    }, 150);
  });
  at("toolbar").addEventListener("submit", (event) => event.preventDefault());
  clicked("more-results", moreResults);
}

// A finding's completions: its filter over the whole run, and the step that is nearest to the one to look at.
function watchFindings() {
  for (const button of document.querySelectorAll("#findings button")) {
    const { run, step, filter } = button.dataset;
    button.addEventListener("click", async () => {
      state.filter = at("filter").value = filter;
      const place = INDEX.runs.findIndex((each) => visible(each.name) === run);
      at("run").value = String(place);
      await chooseRun(place);
      const away = runNow().steps.map((each) => Math.abs(each.step - Number(step)));
      await moveStep(away.indexOf(Math.min(...away)) - state.step);
      at("completions").scrollIntoView();
    });
  }
}

async function start() {
  for (const hidden of document.querySelectorAll(".needs-script")) hidden.hidden = false;
  watchTheme();
  watchKeys();
  if (at("cards")) {
    if (typeof DecompressionStream === "undefined") {
      at("status").textContent = "This browser cannot unpack the completions (it has no DecompressionStream). Use one from 2023 or later.";
    } else {
      const runs = INDEX.runs.map((run, place) => [String(place), run.name]).filter(([place]) => INDEX.runs[place].steps.length);
      fillSelect(at("run"), runs, runs[0][0]);
      watchTokens(at("cards"));
      watchChoices();
      watchFindings();
      await chooseRun(Number(runs[0][0]));
    }
  }
  document.documentElement.dataset.ready = "true";
  performance.mark("report-interactive");
}

start();
