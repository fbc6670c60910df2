"use strict";
(() => {
  const root = document.documentElement;
  const store = {
    get: (name) => { try { return localStorage.getItem("pillarbox." + name); } catch { return null; } },
    set: (name, value) => { try { localStorage.setItem("pillarbox." + name, value); } catch { /* not kept */ } },
  };
  const themes = ["system", "light", "dark"];
  const theme = () => (themes.includes(store.get("theme")) ? store.get("theme") : "system");
  const paint = () => {
    if (theme() === "system") delete root.dataset.theme;
    else root.dataset.theme = theme();
  };
  paint();

  const byId = (id) => document.getElementById(id);
  const say = (text) => { const at = byId("status"); if (at && at.textContent !== text) at.textContent = text; };

  // Replaces the content, and keeps the focus and opened details.
  const replace = (live, html) => {
    const opened = new Set([...live.querySelectorAll("details[open][id]")].map((it) => it.id));
    const focused = live.contains(document.activeElement) ? document.activeElement.id : "";
    live.innerHTML = html;
    for (const id of opened) { const it = byId(id); if (it) it.open = true; }
    if (focused) byId(focused)?.focus({ preventScroll: true });
  };

  const follow = (live) => {
    let source = null, delay = 1000, timer = 0;
    const open = () => {
      clearTimeout(timer);
      if (source || document.hidden) return;
      source = new EventSource(live.dataset.live);
      source.addEventListener("page", (event) => {
        delay = 1000;
        // Don't replace the content while the viewer has selected text in it.
        if (live.contains(getSelection()?.anchorNode) && !getSelection().isCollapsed) return;
        replace(live, event.data);
        root.dataset.updates = Number(root.dataset.updates || 0) + 1;
        say("Live. What is shown changes by itself.");
      });
      source.addEventListener("problem", (event) => say("Not up to date: " + event.data));
      source.onerror = () => {
        say("Not up to date: the connection is lost. Connecting again…");
        // The browser stops reconnecting if the server answers with an error.
        if (source && source.readyState === EventSource.CLOSED) {
          close();
          timer = setTimeout(open, delay);
          delay = Math.min(delay * 2, 15000);
          // After a restart the login has ended: the server redirects to the form.
          fetch(location.href, { headers: { accept: "text/html" }, redirect: "manual" })
            .then((answer) => { if (answer.type === "opaqueredirect") location.reload(); }, () => {});
        }
      };
    };
    const close = () => { source?.close(); source = null; };
    document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
    addEventListener("pagehide", close);
    addEventListener("pageshow", open);
    open();
  };

  const keys = () => {
    const links = Object.fromEntries([...document.querySelectorAll("nav [data-key]")].map((it) => [it.dataset.key, it]));
    const dialog = byId("keys"), on = byId("keys-on");
    on.checked = store.get("keys") !== "off";
    on.addEventListener("change", () => store.set("keys", on.checked ? "on" : "off"));
    const help = byId("help");
    help.hidden = false;
    help.addEventListener("click", () => dialog.showModal());
    let after = -Infinity;
    const move = (step) => {
      const rows = [...document.querySelectorAll("main [data-row]")];
      const at = rows.indexOf(document.activeElement);
      rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + step))]?.focus();
    };
    document.addEventListener("keydown", (event) => {
      if (!on.checked || event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
      // Checkboxes accept no letters, and the dialog's keeps the focus for a moment after it closes.
      if (event.target.matches("input:not([type=checkbox]), select, textarea")) return;
      // The time at which the key was pressed: a busy browser can handle it later.
      const now = event.timeStamp, isSecond = now - after < 3000;
      after = -Infinity;
      if (isSecond && links[event.key]) { links[event.key].click(); return; }
      if (event.key === "g") after = now;
      else if (event.key === "j") move(1);
      else if (event.key === "k") move(-1);
      else if (event.key === "?") dialog.showModal();
      else if (event.key === "/") {
        const filter = document.querySelector("main input:not([type=hidden])");
        if (filter) { event.preventDefault(); filter.focus(); }
      }
    });
  };

  document.addEventListener("DOMContentLoaded", () => {
    const button = byId("theme");
    const label = () => { button.textContent = "Theme: " + theme(); };
    button.hidden = false;
    label();
    button.addEventListener("click", () => {
      store.set("theme", themes[(themes.indexOf(theme()) + 1) % themes.length]);
      paint();
      label();
    });
    const token = byId("token");
    // Browsers don't send the part after # to the server, so no log contains it.
    if (token && location.hash.length > 1) {
      token.value = decodeURIComponent(location.hash.slice(1));
      history.replaceState(null, "", location.pathname);
    }
    if (byId("keys")) keys();
    const live = byId("live");
    if (live) follow(live);
  });
})();
