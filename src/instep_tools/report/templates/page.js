// Shows what runs under the pointer, moves that line with the arrow keys, and zooms. Without this script the page shows all of it, once.
(() => {
  const HINT = 'Point at the picture, or use the arrow keys: this line says what runs at that moment. + and − zoom, Escape shows everything.';
  const STEPS = [1, 2, 5, 10];

  function roundTicks(start, end, most) {
    const least = (end - start) / most, power = 10 ** Math.floor(Math.log10(least));
    const step = STEPS.map(factor => factor * power).find(one => one >= least * (1 - 1e-9));
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let i = Math.ceil(start / step - 1e-9); i * step <= end * (1 + 1e-9); i++) found.push([i * step, (i * step).toFixed(digits)]);
    return found;
  }

  // The value of a curve from a moment on: points are [milliseconds, MiB], in order of time.
  function valueAt(points, moment) {
    let low = 0, high = points.length - 1;
    if (moment > points[high][0]) return null;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (points[middle][0] <= moment) low = middle; else high = middle - 1;
    }
    return points[low][1];
  }

  function lanesAt(panel, moment) {
    const total = +panel.dataset.ms, found = new Map();
    for (const track of panel.querySelectorAll('[data-lane]')) {
      const name = track.dataset.run;
      if (!found.has(name)) found.set(name, []);
      const share = 100 * moment / total;
      const titles = [...track.querySelectorAll('.bar')].filter(bar =>
        parseFloat(bar.style.left) <= share && share <= parseFloat(bar.style.left) + parseFloat(bar.style.width)).map(bar => bar.title);
      if (titles.length) found.get(name).push(titles[titles.length - 1]);
    }
    return [...found].map(([name, titles]) => (name ? name + ': ' : '') + (titles.length ? titles.join('; ') : 'nothing'));
  }

  function curvesAt(panel, moment) {
    return JSON.parse(panel.querySelector('script').textContent).map(curve => {
      const value = valueAt(curve.points, moment);
      return curve.label + ': ' + (value === null ? 'recording over' : value.toFixed(1) + ' MiB');
    });
  }

  for (const panel of document.querySelectorAll('.panel')) {
    const total = +panel.dataset.ms, readout = panel.querySelector('.readout'), axis = panel.querySelector('.axis .track');
    const cursor = panel.appendChild(Object.assign(document.createElement('div'), { className: 'cursor', hidden: true }));
    const at = panel.classList.contains('curves') ? curvesAt : lanesAt;
    let zoom = 1, from = 0, moment = null;

    function draw() {
      from = Math.min(Math.max(from, 0), total - total / zoom);
      for (const scale of panel.querySelectorAll('.scale')) {
        scale.style.width = 100 * zoom + '%';
        scale.style.marginLeft = -100 * zoom * from / total + '%';
      }
      const to = from + total / zoom, width = axis.clientWidth;
      axis.replaceChildren(...roundTicks(from, to, Math.max(2, Math.min(6, width / 90))).map(([value, text]) => {
        const tick = document.createElement('span'), last = (to - value) / (to - from) * width < 55;
        tick.className = last ? 'tick last' : 'tick';
        tick.style.left = 100 * (value - from) / (to - from) + '%';
        tick.textContent = text + ' ms';
        return tick;
      }));
      const visible = moment !== null && moment >= from && moment <= to;
      cursor.hidden = !visible;
      if (visible) cursor.style.left = axis.getBoundingClientRect().left - panel.getBoundingClientRect().left
        + (moment - from) / (to - from) * width + 'px';
      readout.textContent = moment === null ? HINT : moment.toFixed(2) + ' ms\n' + at(panel, moment).join('\n');
    }
    function look(to) {
      moment = Math.min(Math.max(to, 0), total);
      if (moment < from) from = moment;
      if (moment > from + total / zoom) from = moment - total / zoom;
      draw();
    }
    function zoomBy(factor) {
      const middle = moment === null ? from + total / zoom / 2 : moment, share = (middle - from) * zoom / total;
      zoom = Math.min(Math.max(zoom * factor, 1), 1000);
      from = middle - share * total / zoom;
      draw();
    }
    function everything() { zoom = 1; from = 0; moment = null; draw(); }
    function momentOf(event) {
      const box = axis.getBoundingClientRect();
      return from + (event.clientX - box.left) / box.width * total / zoom;
    }

    const small = () => total / zoom / 100;
    const keys = {
      ArrowLeft: () => look((moment ?? from) - small()), ArrowRight: () => look((moment ?? from) + small()),
      Home: () => look(0), End: () => look(total), '+': () => zoomBy(2), '=': () => zoomBy(2), '-': () => zoomBy(.5), Escape: everything,
    };
    panel.addEventListener('keydown', event => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      keys[event.key]();
      event.preventDefault();
    });
    let pressed = null;
    for (const track of panel.querySelectorAll('.track')) {
      track.addEventListener('pointermove', event => look(momentOf(event)));
      track.addEventListener('pointerdown', event => { pressed = momentOf(event); look(pressed); });
      track.addEventListener('dblclick', everything);
      track.addEventListener('pointerup', event => {
        const now = momentOf(event), start = Math.min(pressed ?? now, now), end = Math.max(pressed ?? now, now);
        if (end - start > 3 * small()) { zoom = Math.min(total / (end - start), 1000); from = start; draw(); }
        pressed = null;
      });
    }
    const [closer, away, all] = panel.querySelectorAll('button');
    closer.onclick = () => zoomBy(2); away.onclick = () => zoomBy(.5); all.onclick = everything;
    addEventListener('resize', draw);
    panel.classList.add('scripted');
    draw();
  }
})();
