// Two helpers, without a library and without a request.

// A field above each table in <div class="filtered">, which hides the rows that don't contain its words.
function addFilter(box) {
  const rows = [...box.querySelectorAll("tbody tr")].map((row) => [row, row.textContent.toLowerCase()]);
  const field = document.createElement("input");
  field.type = "search";
  field.className = "filter";
  field.placeholder = "Search, for example: qwen3 moe";
  field.setAttribute("aria-label", "Search the table");
  const count = document.createElement("span");
  count.className = "filter-count";
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const [row, text] of rows) {
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${rows.length}`;
  };
  field.addEventListener("input", show);
  box.prepend(field, count);
  show();
}

// The API was one page once: reference/api/#shardwise.load leads to the page that has it now.
function followOldAnchor() {
  const name = decodeURIComponent(location.hash.slice(1));
  if (!name.startsWith("shardwise.") || document.getElementById(name)) return;
  const link = [...document.querySelectorAll("article a[href]")].find((a) => a.hash === `#${name}`);
  if (link) location.replace(link.href);
}

document.querySelectorAll(".filtered").forEach(addFilter);
followOldAnchor();
