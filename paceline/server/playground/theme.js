// Dark or light before the first paint; `auto` follows the system. The choice outlives the tab, so it lies in localStorage.
(() => {
  const KEY = "paceline-theme";
  const NEXT = { auto: "light", light: "dark", dark: "auto" };

  function remembered() {
    try {
      const theme = localStorage.getItem(KEY);
      return theme in NEXT ? theme : "auto";
    } catch { // storage may be forbidden; the page works without
      return "auto";
    }
  }

  function apply(theme) {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (!button) return;
    button.replaceChildren(document.createTextNode("◐ "), Object.assign(document.createElement("span"), { textContent: theme }));
    button.setAttribute("aria-label", `Theme: ${theme}`);
  }

  apply(remembered());
  document.addEventListener("DOMContentLoaded", () => {
    apply(remembered());
    document.getElementById("theme").addEventListener("click", () => {
      const theme = NEXT[document.documentElement.dataset.theme];
      try {
        localStorage.setItem(KEY, theme);
      } catch { /* then for this page alone */ }
      apply(theme);
    });
  });
})();
