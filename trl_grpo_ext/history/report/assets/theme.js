// Light, dark, or as the system has it.
const THEMES = { auto: "as the system", light: "light", dark: "dark" };

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  at("theme-button").textContent = `Colours: ${THEMES[name]}`;
}

function watchTheme() {
  let name = "auto";
  try {
    name = localStorage.getItem("trl-grpo-ext-report-theme") ?? "auto";
  } catch {
    // A browser may keep nothing for files; then every visit begins with the system's colours.
  }
  if (!(name in THEMES)) name = "auto";
  setTheme(name);
  at("theme-button").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    name = names[(names.indexOf(name) + 1) % names.length];
    setTheme(name);
    try {
      localStorage.setItem("trl-grpo-ext-report-theme", name);
    } catch {
      // As above.
    }
  });
}
