//! Bar charts in a PNG, drawn with a built-in font and without system libraries.

use std::convert::Infallible;
use std::io::Write;
use std::path::Path;

use embedded_graphics::mono_font::ascii::{FONT_6X10, FONT_7X13_BOLD};
use embedded_graphics::mono_font::{MonoFont, MonoTextStyle};
use embedded_graphics::pixelcolor::Rgb888;
use embedded_graphics::prelude::{DrawTarget, Drawable, OriginDimensions, Pixel, Point, Primitive, RgbColor, Size};
use embedded_graphics::primitives::{Line, PrimitiveStyle, Rectangle};
use embedded_graphics::text::{Alignment, Text};
use tensorcask::{Error, Result};

use crate::atomic::AtomicFile;

/// A row of charts below a title.
#[derive(Debug)]
pub(crate) struct Band {
    pub title: String,
    pub charts: Vec<Chart>,
}

/// Bar chart of one or more series side by side, over the same labels.
#[derive(Debug)]
pub(crate) struct Chart {
    pub title: String,
    /// Value at the top of the axis; `top_label` is its text.
    pub top: f64,
    pub top_label: String,
    /// Labels of the x axis; an empty label is not drawn.
    pub labels: Vec<String>,
    pub series: Vec<Series>,
}

/// Bars of one colour.
#[derive(Debug)]
pub(crate) struct Series {
    pub name: &'static str,
    pub values: Vec<f64>,
}

const CHART: Size = Size::new(400, 190);
const MARGIN: i32 = 16;
const HEADING: i32 = 26;
/// Maximum number of bands: a picture with more is large and unreadable.
pub(crate) const MAX_BANDS: usize = 24;
const COLORS: [Rgb888; 2] = [Rgb888::new(0x9a, 0xa5, 0xb1), Rgb888::new(0xc1, 0x12, 0x1f)];
const INK: Rgb888 = Rgb888::new(0x22, 0x22, 0x22);

/// Draws bands below one another into a PNG file. The file appears whole or not at all.
pub(crate) fn write(path: &Path, title: &str, bands: &[Band]) -> Result<()> {
    let bands = bands.get(..MAX_BANDS).unwrap_or(bands);
    let columns = bands.iter().map(|band| band.charts.len()).max().unwrap_or(0) as u32;
    let band_height = HEADING as u32 + CHART.height;
    let mut canvas = Canvas::new(Size::new((columns * CHART.width).max(CHART.width), HEADING as u32 + band_height * bands.len() as u32));
    canvas.text(title, Point::new(MARGIN, 18), &FONT_7X13_BOLD, Alignment::Left);
    for (at, band) in (0i32..).zip(bands) {
        let top = HEADING + at * band_height as i32;
        canvas.text(&band.title, Point::new(MARGIN, top + 16), &FONT_7X13_BOLD, Alignment::Left);
        for (at, chart) in (0i32..).zip(&band.charts) {
            canvas.chart(chart, Point::new(at * CHART.width as i32, top + HEADING));
        }
    }
    let file = AtomicFile::create(path)?;
    let encoded = canvas.encode().and_then(|bytes| Ok(file.file().write_all(&bytes)?));
    encoded.map_err(|e| Error::io(path.display().to_string(), e.into()))?;
    file.commit()
}

/// Pixels, three bytes each.
struct Canvas {
    size: Size,
    pixels: Vec<u8>,
}

impl Canvas {
    fn new(size: Size) -> Self {
        Self { size, pixels: vec![0xff; (size.width * size.height) as usize * 3] }
    }

    fn encode(&self) -> std::result::Result<Vec<u8>, png::EncodingError> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.size.width, self.size.height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&self.pixels)?;
        writer.finish()?;
        Ok(bytes)
    }

    fn text(&mut self, text: &str, at: Point, font: &MonoFont<'_>, alignment: Alignment) {
        let Ok(_) = Text::with_alignment(text, at, MonoTextStyle::new(font, INK), alignment).draw(self);
    }

    fn bar(&mut self, at: Point, size: Size, color: Rgb888) {
        let Ok(()) = Rectangle::new(at, size).into_styled(PrimitiveStyle::with_fill(color)).draw(self);
    }

    fn chart(&mut self, chart: &Chart, corner: Point) {
        let left = corner.x + MARGIN + 34;
        let top = corner.y + 22;
        let width = CHART.width as i32 - 2 * MARGIN - 34;
        let height = CHART.height as i32 - 22 - 28;
        let base = top + height;
        self.text(&chart.title, Point::new(left, corner.y + 10), &FONT_6X10, Alignment::Left);
        self.text(&chart.top_label, Point::new(left - 4, top + 7), &FONT_6X10, Alignment::Right);
        self.text("0", Point::new(left - 4, base), &FONT_6X10, Alignment::Right);
        for y in [top, base] {
            let line = Line::new(Point::new(left, y), Point::new(left + width, y));
            let Ok(()) = line.into_styled(PrimitiveStyle::with_stroke(if y == base { INK } else { COLORS[0] }, 1)).draw(self);
        }
        let places = chart.labels.len().max(1) as f64;
        let slot = f64::from(width) / places;
        let bar_width = (slot * 0.8 / chart.series.len().max(1) as f64).max(1.0);
        for (place, label) in chart.labels.iter().enumerate() {
            let start = f64::from(left) + slot * place as f64;
            for (nth, (series, color)) in chart.series.iter().zip(COLORS.iter().cycle().skip(2 - chart.series.len().min(2))).enumerate() {
                let value = series.values.get(place).copied().unwrap_or(0.0);
                let share = if chart.top > 0.0 { (value / chart.top).clamp(0.0, 1.0) } else { 0.0 };
                // A value above zero gets at least one pixel.
                let tall = if value > 0.0 { (share * f64::from(height)).round().max(1.0) } else { 0.0 } as i32;
                let x = (start + slot * 0.1 + bar_width * nth as f64) as i32;
                self.bar(Point::new(x, base - tall), Size::new(bar_width as u32, tall as u32), *color);
            }
            self.text(label, Point::new((start + slot / 2.0) as i32, base + 11), &FONT_6X10, Alignment::Center);
        }
        let mut x = left;
        let legend = chart.series.iter().zip(COLORS.iter().cycle().skip(2 - chart.series.len().min(2)));
        for (series, color) in legend.filter(|_| chart.series.len() > 1) {
            self.bar(Point::new(x, base + 17), Size::new(8, 8), *color);
            self.text(series.name, Point::new(x + 12, base + 24), &FONT_6X10, Alignment::Left);
            x += 24 + 6 * series.name.len() as i32;
        }
    }
}

impl OriginDimensions for Canvas {
    fn size(&self) -> Size {
        self.size
    }
}

impl DrawTarget for Canvas {
    type Color = Rgb888;
    type Error = Infallible;

    /// Pixels outside the image are not drawn.
    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(&mut self, pixels: I) -> std::result::Result<(), Infallible> {
        for Pixel(at, color) in pixels {
            let (Ok(x), Ok(y)) = (u32::try_from(at.x), u32::try_from(at.y)) else { continue };
            if x >= self.size.width {
                continue;
            }
            let start = (y as usize * self.size.width as usize + x as usize) * 3;
            if let Some(pixel) = self.pixels.get_mut(start..start + 3) {
                pixel.copy_from_slice(&[color.r(), color.g(), color.b()]);
            }
        }
        Ok(())
    }
}
