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

  // On a narrow screen each cell names its column.
  const label = (root) => {
    for (const table of root.querySelectorAll("table")) {
      const names = [...table.querySelectorAll("thead th")].map((it) => it.textContent.trim());
      for (const row of table.tBodies[0]?.rows ?? []) {
        [...row.cells].forEach((cell, at) => { if (names[at]) cell.dataset.label = names[at]; });
      }
    }
  };

  // Replaces the content, and keeps the focus and opened details.
  const replace = (live, html) => {
    const opened = new Set([...live.querySelectorAll("details[open][id]")].map((it) => it.id));
    const focused = live.contains(document.activeElement) ? document.activeElement.id : "";
    live.innerHTML = html;
    label(live);
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
        say("Live");
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
    label(document);
    const token = byId("token");
    // Browsers don't send the part after # to the server, so no log contains it.
    if (token && location.hash.length > 1) {
      token.value = decodeURIComponent(location.hash.slice(1));
      history.replaceState(null, "", location.pathname);
    }
    const live = byId("live");
    if (live) follow(live);
  });
})();
